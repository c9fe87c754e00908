#pragma once
// The definition of the convolution before a recurrence (convolution.hpp), token by token in double
// precision: the twin of its kernel. Serial, never tuned.

#include <cstdint>
#include <vector>

#include "recurrence/recurrence_reference.hpp"

namespace gyre {

/// One head of queries, keys or values over a document, and its results, [tokens, dim] each.
///
/// Errors are squares, in units of the square of an error of one rounding: those of y are errors of
/// the sums z, of SiLU and of the normalisation.
class ConvolvedHead {
 public:
  /// x: [tokens, dim]. weights: [dim, width].
  ConvolvedHead(std::vector<double> x, std::vector<double> weights, int64_t dim, int64_t width,
                bool normalised);

  const std::vector<double>& y() const { return y_; }
  const std::vector<double>& errors() const { return errors_; }
  /// Gradients of x and of the weights from those of y, sized as those of a recurrence. The
  /// weights' sizes are squares: [dim, width].
  struct Gradients {
    SizedRows x;
    std::vector<double> weights, weight_squares;
  };
  Gradients backward(const SizedRows& d_y) const;

 private:
  struct Term {
    double value = 0, square = 0;  ///< square: of its errors
  };
  int64_t tokens() const { return static_cast<int64_t>(x_.size()) / dim_; }
  /// z_t of channel c.
  Term sum(int64_t t, int64_t c) const;
  /// Gradients of z_t from those of y_t: [dim].
  std::vector<Term> slopes(const SizedRows& d_y, int64_t t) const;

  std::vector<double> x_, weights_;
  int64_t dim_, width_;
  bool normalised_;
  std::vector<double> y_, errors_;
  std::vector<double> factors_, factor_errors_;  // [tokens] 1 / sqrt(...); relative squares
};

}  // namespace gyre
