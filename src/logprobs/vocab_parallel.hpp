#pragma once
// Log-probabilities of given ids, and entropies, from a vocabulary sharded over tensor-parallel
// ranks.
//
//     serial:   m = max z     s = Σ e^{x}     t = Σ x e^{x}     with x = (z - m) / temperature
//               log p_k = x_{id_k} - log s         H = log s - t / s
//
//     forward   each rank: one pass over its columns (softmax_partials), and the logits of its ids
//               one all-gather of 4 · (2 + K + 1 if entropy) bytes per token
//               each rank merges all ranks' records in rank order: the same bits everywhere
//               (score_records.hpp)
//     backward  each rank: one pass over its columns (row_gradient); no communication
//
// Example, 2 ranks, logits 0 1 2 | 3 4, one id, 4:
//     rank 0   max 2, sum 1.503, logit -        rank 1   max 4, sum 1.368, logit 4
//     merged   m = 4, s = 1.503 e^-2 + 1.368 = 1.571, log p_4 = (4 - 4) - log 1.571 = -0.452
//
// Gradients: the upstream gradient is the same on all ranks of the group, and each rank
// differentiates its own columns, as for a loss that every rank computes identically.
//
// Based on DistributedLogprob, ChunkedDistributedGatherLogprob and ChunkedDistributedEntropy of
// NeMo RL, but entropies are Shannon's, -Σ p log p >= 0 (NeMo RL returns the negative), and padding
// columns and -inf logits are excluded.
//
// Logits, their gradients, and the records that VocabScores and SoftCrossEntropy exchange by
// `arrays` are in the memory space of the RowKernels; all else, including the buffers of `tp`, is
// host memory.

#include <cstdint>
#include <memory>
#include <span>

#include "comm/communicator.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/records/cross_records.hpp"
#include "logprobs/records/score_records.hpp"
#include "logprobs/rows/row_gradient.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "logprobs/rows/row_statistics.hpp"
#include "logprobs/score_detail.hpp"
#include "logprobs/vocab_partition.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

struct ScoreOptions {
  int64_t ids_per_token = 1;  ///< K: ids per token
  bool entropy = false;       ///< whether entropies are requested
  double temperature = 1;
  int threads = 1;
  RowKernels* kernels = nullptr;  ///< in the memory space of logits and gradients; null: host
  /// Has the ranks of `tp` in the same order, and buffers in the memory space of `kernels`. null:
  /// tp, which suffices for host memory or one rank.
  Communicator* arrays = nullptr;
  /// One for each token, instead of `temperature`; empty: that of all.
  std::span<const double> temperatures = {};
  bool mean_logprob = false;  ///< whether means of log p over the vocabulary are requested
};

/// Upstream gradients of the scores of each row. Empty: 0.
struct ScoreGradients {
  std::span<const float> logprob;            ///< [tokens, K]
  std::span<const float> entropy = {};       ///< [tokens]
  std::span<const float> log_sum_exp = {};   ///< [tokens], of logits / temperature
  std::span<const float> mean_logprob = {};  ///< [tokens]
};

/// Scores of `tokens` rows. Keeps 8 bytes per token for backward (12 with entropies), and the
/// partials and records of all ranks.
class VocabScores {
 public:
  /// Collective over `tp`. All ranks throw the same usage error if `vocab` and `tp` have different
  /// numbers of ranks, an argument differs between ranks, `tokens` or ids_per_token is negative, or
  /// the temperature or its inverse is not positive and finite in f32. Later calls compare nothing.
  VocabScores(int64_t tokens, const VocabPartition& vocab, const ScoreOptions& options,
              Communicator& tp);

  /// Sets the number of rows, equal on all ranks, if they have one temperature. No communication;
  /// discards the last pass.
  void resize(int64_t tokens);

  /// logprob [tokens, K] <- log-probabilities of ids [tokens, K] (global), and entropy and
  /// mean_logprob [tokens] (empty unless requested), from logits [tokens, this rank's columns], f32
  /// or bf16. An id that no rank owns scores 0. `stream` is the kernels' stream. Returns the
  /// seconds that it waited for other ranks. Collective: one all-gather.
  double forward(ConstMatrixRef logits, std::span<const int32_t> ids, Stream& stream,
                 std::span<float> logprob, std::span<float> entropy,
                 std::span<float> mean_logprob = {});

  /// d_logits [tokens, columns] <- gradient from those of the scores, after a forward pass with the
  /// same logits and ids. d_logits may be the logits' memory. The gradient of an id that no rank
  /// owns counts like one of an id on another rank: set it to 0 for tokens without a target. No
  /// communication.
  void backward(ConstMatrixRef logits, std::span<const int32_t> ids, const ScoreGradients& above,
                MatrixRef d_logits) const;

  /// out [tokens, columns] <- log-probabilities of all columns, or probabilities if `exponentiate`,
  /// after a forward pass. No communication.
  void write_log_softmax(ConstMatrixRef logits, bool exponentiate, MatrixRef out) const;

  /// d_logits [tokens, columns] <- gradient from d_logprobs [tokens, columns], that of the results
  /// of write_log_softmax() for this rank's columns, after a forward pass. d_logits may be the
  /// logits' memory. Collective: one all-gather of 8 bytes per token. Returns the seconds that it
  /// waited for other ranks.
  double log_softmax_backward(ConstMatrixRef logits, ConstMatrixRef d_logprobs, Stream& stream,
                              MatrixRef d_logits) const;

  /// Normalizers of the last forward pass: log p_v = (z_v - max) / temperature - log_sum. [tokens]
  std::span<const RowNormalizer> normalizers() const { return normalizers_.span(); }
  const VocabPartition& vocab() const { return vocab_; }

 private:
  RowScale scale() const { return {scale_of(options_.temperature), scales_of_rows(scales_)}; }
  RowPass pass() const;

  int64_t tokens_;
  VocabPartition vocab_;
  ScoreOptions options_;
  Communicator& tp_;
  Communicator& arrays_;
  RowKernels& kernels_;
  Buffer<float> scales_;  // [tokens] 1 / temperature of each, or empty: one for all
  std::unique_ptr<ScoreRecords> records_;
  Buffer<RowNormalizer> normalizers_;  // [tokens]
  Buffer<float> entropy_;              // [tokens] or empty
  Buffer<float> mean_logprob_;         // [tokens] or empty
};

/// -Σ_v p_v log q_v for a teacher's distribution p and the student's q, with equal shards. One
/// all-gather of 20 bytes per token; keeps 16 for backward. The teacher gets no gradient. Based on
/// DistributedCrossEntropy of NeMo RL.
class SoftCrossEntropy {
 public:
  /// Collective. Throws the errors of VocabScores. `arrays`: as in ScoreOptions.
  SoftCrossEntropy(int64_t tokens, const VocabPartition& vocab, int threads, Communicator& tp,
                   RowKernels* kernels = nullptr, Communicator* arrays = nullptr);

  /// Sets the number of rows, equal on all ranks. No communication; discards the last pass.
  void resize(int64_t tokens);

  /// value [tokens] (nats) <- cross entropies. `stream` is the kernels' stream. Collective: one
  /// all-gather. Returns the seconds that the stream waited for other ranks.
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
  Buffer<std::byte> own_memory_, all_memory_;  // records
  Buffer<RowNormalizer> students_, teachers_;  // [tokens]
  Buffer<float> value_;                        // [tokens]
};

/// Raw logits at given global ids; reads nothing else. One all-reduce of 4 K bytes per token. Based
/// on gather_logits_at_global_indices of NeMo RL.
class GatheredLogits {
 public:
  /// Collective. Throws the errors of VocabScores.
  GatheredLogits(int64_t tokens, const VocabPartition& vocab, int64_t ids_per_token, int threads,
                 Communicator& tp, RowKernels* kernels = nullptr);

  /// values [tokens, K] <- logits at ids [tokens, K]; 0 if no rank owns the id. Collective: one
  /// all-reduce. Returns the seconds that it waited for other ranks.
  double forward(ConstMatrixRef logits, std::span<const int32_t> ids, Stream& stream,
                 std::span<float> values);
  /// d_logits [tokens, columns] <- sums of d_values at the ids, 0 elsewhere.
  void backward(std::span<const int32_t> ids, std::span<const float> d_values,
                MatrixRef d_logits) const;

 private:
  int64_t tokens_;
  VocabPartition vocab_;
  int64_t ids_per_token_;
  int threads_;
  Communicator& tp_;
  RowKernels& kernels_;
};

}  // namespace gyre
