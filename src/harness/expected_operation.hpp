#pragma once
// This file computes what an operation on rows (logprobs/operations/operation.hpp) should give for
// one row: results and gradient by its definition, and how far computed ones may be from them.
//
// Errors of statistics are those of log-probabilities and entropies (logprobs/tolerance.hpp).
// Slopes, the derivatives by the statistics, carry them to the results and to the gradient.

#include <memory>
#include <span>
#include <vector>

#include "harness/result_array.hpp"
#include "logprobs/operations/operation.hpp"

namespace gyre {

/// One row of the inputs of an operation. The spans must outlive what is made of them.
struct OperationCase {
  const RowOperation& operation;
  std::span<const double> logits;  ///< [vocab_size]
  std::span<const int32_t> ids = {};
  std::vector<std::span<const float>> inputs = {};  ///< of the operation's, [1] or [K] each
  std::span<const double> parameters = {};
  double temperature = 1;
  bool rounds_terms = false;  ///< whether each term of a gradient is rounded, not only their sum
};

class ExpectedOperation {
 public:
  explicit ExpectedOperation(const OperationCase& of);

  /// Result `i` of the row, with error scales.
  ExpectedRow values(size_t i) const;
  /// Gradient of the logits from those of all results, one after the other.
  ExpectedRow gradient(std::span<const double> g) const;

 private:
  struct Sizes;
  Sizes sizes_of(std::span<const double> g) const;
  double error_of_sum(double value, std::span<const double> unit) const;
  bool leaves_f32(std::span<const double> g) const;
  double entropy_error() const;

  OperationCase case_;
  std::vector<double> logprobs_, of_ids_;
  WholeRow row_;
};

}  // namespace gyre
