#pragma once
// Log-probabilities of given ids and entropies from a vocabulary that is split over tensor-parallel
// ranks.
//
//     serial:   m = max z     s = Σ e^{x}     t = Σ x e^{x}     with x = (z - m) / temperature
//               log p_k = x_{id_k} - log s         H = log s - t / s
//
//     forward   each rank: one pass over its columns (row_moments), and the logits of its ids
//               one all-gather of 4 · (2 + K + 1 if entropy) bytes a token
//               each rank merges all ranks' records in rank order: the same bits everywhere
//               (score_records.hpp)
//     backward  each rank: one pass over its columns (row_gradient); no communication
//
// Example, 2 ranks, logits 0 1 2 | 3 4, one id, 4:
//     rank 0   max 2, sum 1.503, logit -        rank 1   max 4, sum 1.368, logit 4
//     merged   m = 4, s = 1.503 e^-2 + 1.368 = 1.571, log p_4 = (4 - 4) - log 1.571 = -0.452
//
// Gradients: what comes from above is the same on all ranks of the group, and each rank
// differentiates its own columns. This is the contract of a loss that every rank computes alike.
//
// After DistributedLogprob, ChunkedDistributedGatherLogprob and ChunkedDistributedEntropy of NeMo
// RL; entropies here are Shannon's, -Σ p log p >= 0, the negative of what it returns, and padded
// columns and -inf logits take no part.
//
// Logits and their gradients lie in the memory of the RowKernels, and so do the records that
// VocabScores and SoftCrossEntropy exchange, by `arrays`; all else is host memory, and so are the
// buffers of `tp`.

#include <cstdint>
#include <memory>
#include <span>

#include "comm/communicator.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/cross_records.hpp"
#include "logprobs/row_gradient.hpp"
#include "logprobs/row_kernels.hpp"
#include "logprobs/row_statistics.hpp"
#include "logprobs/score_records.hpp"
#include "logprobs/vocab_partition.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

struct ScoreOptions {
  int64_t picks = 1;     ///< K: ids of each token
  bool entropy = false;  ///< whether entropies are asked for
  double temperature = 1;
  int threads = 1;
  RowKernels* kernels = nullptr;  ///< of the memory that logits and gradients lie in; null: host
  /// The ranks of `tp` in their order, in the memory of `kernels`; null: tp itself, which does
  /// where that is the host's, and on one rank.
  Communicator* arrays = nullptr;
};

/// The scores of `tokens` rows. Holds what backward needs, 8 bytes a token (12 with entropies), and
/// the moments and records of all ranks.
class VocabScores {
 public:
  /// Collective over `tp`: all ranks throw the same usage error when the partition is not of as
  /// many ranks, when an argument differs between ranks, when picks < 0, or unless the temperature
  /// is positive and finite. Nothing is checked by communication after that.
  VocabScores(int64_t tokens, const VocabPartition& vocab, const ScoreOptions& options,
              Communicator& tp);

  /// For another number of rows, the same on all ranks. No communication; forgets the last pass.
  void resize(int64_t tokens);

  /// logprob [tokens, K] <- log-probabilities of ids [tokens, K] (global), and entropy [tokens]
  /// (empty unless asked for), from logits [tokens, this rank's columns], f32 or bf16. An id that
  /// nobody owns scores 0. `stream` is the kernels'. Returns the seconds that it waited for other
  /// ranks. Collective: one all-gather.
  double forward(ConstMatrixRef logits, std::span<const int32_t> ids, Stream& stream,
                 std::span<float> logprob, std::span<float> entropy);

  /// d_logits [tokens, columns] <- the gradient, from those of logprob [tokens, K] and entropy
  /// [tokens] (empty: none), after a forward pass of the same logits and ids. d_logits may be the
  /// logits' memory. The g of an id that nobody owns counts, as if it were a column elsewhere: set
  /// it to 0 for tokens without a target. No communication.
  void backward(ConstMatrixRef logits, std::span<const int32_t> ids,
                std::span<const float> d_logprob, std::span<const float> d_entropy,
                MatrixRef d_logits) const;

  /// out [tokens, columns] <- log-probabilities of all columns, or probabilities, after a forward
  /// pass. No communication.
  void write_log_softmax(ConstMatrixRef logits, bool exponentiate, MatrixRef out) const;

  /// d_logits [tokens, columns] <- the gradient, from that of every log-probability of
  /// write_log_softmax, d_logprobs [tokens, columns], after a forward pass; may be the logits'
  /// memory. d_logprobs differs between ranks: each has the part of its columns. Collective: one
  /// all-gather of 8 bytes a token. Returns the seconds waited.
  double log_softmax_backward(ConstMatrixRef logits, ConstMatrixRef d_logprobs, Stream& stream,
                              MatrixRef d_logits) const;

  /// Of the last forward pass: log p_v = (z_v - max) / temperature - log_sum. [tokens]
  std::span<const RowNormalizer> normalizers() const { return normalizers_.span(); }
  const VocabPartition& vocab() const { return vocab_; }

 private:
  float scale() const;
  RowPass pass() const;

  int64_t tokens_;
  VocabPartition vocab_;
  ScoreOptions options_;
  Communicator& tp_;
  Communicator& arrays_;
  RowKernels& kernels_;
  std::unique_ptr<ScoreRecords> records_;
  Buffer<RowNormalizer> normalizers_;  // [tokens]
  Buffer<float> entropy_;              // [tokens] or empty
};

/// -Σ_v p_v log q_v with p a teacher's distribution and q the student's, both split alike. One
/// all-gather of 20 bytes a token; 16 are kept. No gradient to the teacher. After
/// DistributedCrossEntropy of NeMo RL.
class SoftCrossEntropy {
 public:
  /// Collective; errors as VocabScores. `arrays`: as in ScoreOptions.
  SoftCrossEntropy(int64_t tokens, const VocabPartition& vocab, int threads, Communicator& tp,
                   RowKernels* kernels = nullptr, Communicator* arrays = nullptr);

  /// value [tokens] (nats). `stream` is the kernels'. Collective: one all-gather. Returns the
  /// seconds that the stream waited for other ranks.
  double forward(ConstMatrixRef student, ConstMatrixRef teacher, Stream& stream,
                 std::span<float> value);
  /// d_student [tokens, columns] <- d_value (q - p); may be the student's memory.
  void backward(ConstMatrixRef student, ConstMatrixRef teacher, std::span<const float> d_value,
                MatrixRef d_student) const;

 private:
  int64_t tokens_;
  VocabPartition vocab_;
  int threads_;
  Communicator& tp_;
  Communicator& arrays_;
  RowKernels& kernels_;
  std::unique_ptr<CrossRecords> records_;
  Buffer<RowNormalizer> students_, teachers_;  // [tokens]
};

/// Raw logits at given global ids; touches nothing else. One all-reduce of 4 K bytes a token. After
/// gather_logits_at_global_indices of NeMo RL.
class GatheredLogits {
 public:
  /// Collective; errors as VocabScores.
  GatheredLogits(int64_t tokens, const VocabPartition& vocab, int64_t picks, int threads,
                 Communicator& tp, RowKernels* kernels = nullptr);

  /// values [tokens, K] <- logits at ids [tokens, K]; 0 where nobody owns the id. Collective: one
  /// all-reduce. Returns the seconds waited.
  double forward(ConstMatrixRef logits, std::span<const int32_t> ids, Stream& stream,
                 std::span<float> values);
  /// d_logits [tokens, columns] <- the sums of d_values at the ids, 0 elsewhere.
  void backward(std::span<const int32_t> ids, std::span<const float> d_values,
                MatrixRef d_logits) const;

 private:
  int64_t tokens_;
  VocabPartition vocab_;
  int64_t picks_;
  int threads_;
  Communicator& tp_;
  RowKernels& kernels_;
};

}  // namespace gyre
