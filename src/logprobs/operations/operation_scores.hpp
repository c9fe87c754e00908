#pragma once
// Runs an operation on rows (operations/operation.hpp) over a vocabulary that is sharded over
// tensor-parallel ranks. All operations differ only in their entries.
//
//     forward    VocabScores: one pass, one all-gather of 4 · sent_floats() bytes per row; or, for
//                an operation on logits, GatheredLogits: one all-reduce of 4 K bytes per row
//                each rank: values() of each row, in host memory
//     backward   each rank: slopes() of each row, one pass over its columns; no communication

#include <memory>
#include <span>
#include <vector>

#include "logprobs/operations/operation.hpp"
#include "logprobs/vocab_parallel.hpp"

namespace gyre {

struct OperationOptions {
  int64_t ids_per_token = 0;            ///< K
  std::vector<double> parameters = {};  ///< of the operation's, in their order
  double temperature = 1;
  int threads = 1;
  RowKernels* kernels = nullptr;              ///< as in ScoreOptions
  Communicator* arrays = nullptr;             ///< as in ScoreOptions
  std::span<const double> temperatures = {};  ///< as in ScoreOptions
};

/// Inputs of all rows, in host memory.
struct OperationInputs {
  std::span<const int32_t> ids = {};                ///< [tokens, K]
  std::vector<std::span<const float>> arrays = {};  ///< of RowOperation::inputs, row by row
};

class OperationScores {
 public:
  /// Collective. Throws the errors of VocabScores or GatheredLogits. `operation` must outlive this.
  OperationScores(const RowOperation& operation, int64_t tokens, const VocabPartition& vocab,
                  const OperationOptions& options, Communicator& tp);

  /// results [of the operation] <- arrays [tokens] or [tokens, K], from logits [tokens, this rank's
  /// columns]. `stream` is the kernels' stream. Collective. Returns the seconds that it waited for
  /// other ranks.
  double forward(ConstMatrixRef logits, const OperationInputs& inputs, Stream& stream,
                 std::span<const std::span<float>> results);
  /// d_logits [tokens, columns] <- gradient from those of the results (empty: 0), after a forward
  /// pass with the same logits and inputs. May be the logits' memory. No communication.
  void backward(ConstMatrixRef logits, const OperationInputs& inputs,
                std::span<const std::span<const float>> d_results, MatrixRef d_logits) const;

 private:
  /// A row of the last forward pass, and room for what its statistics and inputs refer to.
  struct Room;
  OperationRow row(int64_t token, const OperationInputs& inputs, Room& room) const;
  /// Calls body(token, room) for all rows, distributed over threads.
  template <class Body>
  void for_each_token(Body body) const;
  void check_call(const OperationInputs& inputs, size_t results) const;

  const RowOperation& operation_;
  int64_t tokens_, vocab_size_;
  OperationOptions options_;
  Buffer<float> scales_;                      // [tokens] 1 / temperature, or empty: one for all
  std::unique_ptr<VocabScores> scores_;       // unless the operation is on logits
  std::unique_ptr<GatheredLogits> gathered_;  // if it is
  Buffer<float> of_ids_;                      // [tokens, K]
  Buffer<float> entropy_, mean_logprob_;      // [tokens], or empty
};

}  // namespace gyre
