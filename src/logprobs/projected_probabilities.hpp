#pragma once
// Probabilities of a sharded vocabulary, projected to the columns of another one by a sparse matrix
// of non-negative weights, as distillation between two tokenizers needs: columns are a teacher's
// ids, or those of them that are kept.
//
//     serial:   p = softmax(z / T)        out_c = Σ_s p_s M_sc
//     gradient  dz_s = p_s (g_s - Σ_u p_u g_u) / T        g = M d_out
//
//     forward   each rank: one pass over its columns, which are in cache when those with entries
//               are read again: the shard's maximum, sum, and own projection (row_projection.hpp)
//               one all-gather of 8 bytes per token, maximum and sum: each rank's share of the
//               probability, by which it multiplies its projection
//               one all-reduce of 4 K bytes per token for K columns
//     backward  each rank: one pass over its columns; Σ_u p_u g_u = Σ_c d_c out_c, so there is no
//               communication
//
// One all-gather of maximum, sum and K columns would save the first message, but send (ranks - 1)
// (8 + 4 K) bytes per token, where these two send 8 (ranks - 1) + 8 K (ranks - 1) / ranks: equal
// for 2 ranks, a quarter for 8. It would also need memory for the records of all ranks; here it is
// that of the result.
//
// Example, 2 ranks, logits 0 1 2 | 3 4, M with entries (1, 0): 1, (3, 0): 0.5, (4, 1): 1
//     rank 0   max 2, sum 1.503, own 0.245 0      rank 1   max 4, sum 1.368, own 0.134 0.731
//     shares   0.129 and 0.871                    out   0.149 0.636
//
// Based on project_student_to_teacher_vocab of NeMo RL, which takes log-probabilities of all ids
// in f32 first.

#include <cstdint>
#include <memory>
#include <span>

#include "comm/communicator.hpp"
#include "core/matrix_ref.hpp"
#include "core/sparse_matrix.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "logprobs/rows/row_projection.hpp"
#include "logprobs/vocab_partition.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

struct ProjectionOptions {
  double temperature = 1;
  int threads = 1;
  RowKernels* kernels = nullptr;   ///< as in ScoreOptions
  Communicator* arrays = nullptr;  ///< as in ScoreOptions
  /// One for each token, instead of `temperature`; empty: that of all.
  std::span<const double> temperatures = {};
};

class ProjectedProbabilities {
 public:
  /// Collective. All ranks throw the same usage error if `vocab` and `tp` differ in number of
  /// ranks, an argument differs between ranks, tokens < 0, `matrix` has a fault or not a row for
  /// each id, or the temperature or its inverse is not positive and finite in f32.
  ProjectedProbabilities(int64_t tokens, const VocabPartition& vocab, const SparseMatrixRef& matrix,
                         const ProjectionOptions& options, Communicator& tp);

  /// out [tokens, width] (without gaps) <- projected probabilities, from logits [tokens, own
  /// columns]; both in the memory space of the kernels. NaN in rows with NaN or +inf, or with only
  /// -inf. `stream` is the kernels' stream. Collective: one all-gather, one all-reduce. Returns the
  /// seconds waited.
  double forward(ConstMatrixRef logits, Stream& stream, MatrixView<float> out);
  /// d_logits [tokens, own columns] <- gradient from d_out [tokens, width], after a forward pass
  /// with these logits and its `out`. May be the logits' memory.
  void backward(ConstMatrixRef logits, MatrixView<const float> out, MatrixView<const float> d_out,
                MatrixRef d_logits) const;

 private:
  RowScale scale() const { return {scale_, scales_.size() == 0 ? nullptr : scales_.data()}; }
  /// Merges the partials of all ranks. Sets normalizers_; shares [tokens] <- this rank's
  /// probability of each token's row, NaN for a row that is no distribution.
  void merge(std::span<const SoftmaxPartial> own, Stream& stream, std::span<float> shares);

  int64_t tokens_, width_;
  VocabPartition vocab_;
  Communicator& tp_;
  Communicator& arrays_;
  RowKernels& kernels_;
  int threads_;
  float scale_;
  Buffer<float> scales_;  // [tokens], or empty: one for all
  std::unique_ptr<RowProjection> projection_;
  Buffer<RowNormalizer> normalizers_;  // [tokens]
};

}  // namespace gyre
