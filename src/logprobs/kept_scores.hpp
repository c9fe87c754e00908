#pragma once
// Log-probabilities among stored sets of ids, one set for each row, as samplers return them: the
// ids that were left to sample from when a rollout was made. The vocabulary is sharded over ranks.
//
//     serial:   log p_t = (z_t - m) / T - log Σ_{v in set} exp((z_v - m) / T)     m = max in set
//               -inf if the target is not in the set; a row without ids scores -inf
//     gradient  dz_v = g ({v = t} - p_v) / T for v in the set, 0 for other columns
//
//     forward   each rank: the logits of its ids of each set, their maximum and sum
//               one all-gather of 12 bytes per row: maximum, sum, logit of the target
//     backward  each rank writes zeros, and the gradients of its ids: no communication, and the
//               logits are not read
//
// Example, 2 ranks, logits 0 1 2 | 3 4, set 1 3 4, target 3:
//     rank 0   max 1, sum 1, no target          rank 1   max 4, sum 1 + e^-1, target 3
//     merged   m = 4, sum = 1 + e^-1 + e^-3 = 1.418, log p_3 = -1 - log 1.418 = -1.349
//
// Unlike FilteredScores, nothing is decided here: the trainer's logits may differ from the
// sampler's, and the set remains what the sampler kept.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "logprobs/vocab_partition.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

/// Sets of ids, one for each row: row r has ids[offsets[r]] to ids[offsets[r + 1] - 1].
struct KeptIds {
  std::span<const int64_t> offsets;  ///< [rows + 1]
  std::span<const int32_t> ids;      ///< global; those of a row are different

  std::span<const int32_t> of(int64_t row) const {
    return ids.subspan(offsets[row], offsets[row + 1] - offsets[row]);
  }
};

/// Most ids of a row on one rank.
inline constexpr int64_t most_kept_ids = 65536;

/// Names the first row of which a rank has more than most_kept_ids ids; empty if there is none. Ids
/// are in the vocabulary.
std::string too_many_kept(const KeptIds& kept, const VocabPartition& vocab);

struct KeptOptions {
  double temperature = 1;
  int threads = 1;
  RowKernels* kernels = nullptr;  ///< as in ScoreOptions
  /// One for each row, instead of `temperature`; empty: that of all.
  std::span<const double> temperatures = {};
};

class KeptScores {
 public:
  /// Collective. All ranks throw the same usage error if `vocab` and `tp` differ in number of
  /// ranks, an argument differs between ranks, tokens < 0, offsets do not divide the ids over
  /// `tokens` rows, an id is outside the vocabulary, a rank has more than most_kept_ids ids of a
  /// row, or the temperature or its inverse is not positive and finite in f32.
  KeptScores(int64_t tokens, const VocabPartition& vocab, const KeptIds& kept,
             const KeptOptions& options, Communicator& tp);

  /// logprob [tokens] <- log-probabilities of targets [tokens] (global ids) in their sets, from
  /// logits [tokens, own columns]. NaN for a set with NaN or +inf, or with only -inf. Collective:
  /// one all-gather. Returns the seconds waited.
  double forward(ConstMatrixRef logits, std::span<const int32_t> targets, Stream& stream,
                 std::span<float> logprob);
  /// d_logits [tokens, own columns] <- gradient from d_logprob [tokens], after a forward pass with
  /// these targets. May be the logits' memory. NaN for the ids of a set that scores NaN.
  void backward(std::span<const int32_t> targets, std::span<const float> d_logprob,
                MatrixRef d_logits) const;

 private:
  double scale(int64_t row) const { return scales_.size() == 0 ? scale_ : scales_[row]; }
  std::span<const int32_t> own_ids(int64_t row) const;
  /// Calls body(begin, count, width) for blocks of rows; `width`: most own ids of a row.
  template <class Body>
  void for_each_block(Body body) const;

  int64_t tokens_;
  VocabPartition vocab_;
  Communicator& tp_;
  RowKernels& kernels_;
  int threads_;
  double scale_;
  Buffer<float> scales_;               // [tokens], or empty: one for all
  std::vector<int64_t> own_offsets_;   // [tokens + 1]
  std::vector<int32_t> own_ids_;       // ids of this shard, row by row
  std::vector<bool> is_empty_;         // [tokens] whether the set is, over all ranks
  std::vector<float> values_;          // their logits, by the last forward pass
  std::vector<double> max_, log_sum_;  // [tokens] of the sets
};

}  // namespace gyre
