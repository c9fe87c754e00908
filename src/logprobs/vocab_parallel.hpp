#pragma once
// Log-probability and entropy from a vocabulary that is split over tensor-parallel ranks: one pass
// over the local columns (row_statistics), one all-gather of 16 bytes a token, a merge in rank
// order that is bit-identical on all ranks.
//
//     serial:  m = max z;  s = Σ e^{z-m};  t = Σ (z-m) e^{z-m};  log p_j = (z_j - m) - log s;  H =
//     log s - t/s

#include <cstdint>
#include <span>

#include "comm/communicator.hpp"
#include "logprobs/row_statistics.hpp"

namespace gyre {

/// Columns [begin, begin + columns) of a padded vocabulary on one rank.
struct VocabShard {
  int64_t begin = 0;
  int64_t columns = 0;
};
/// Equal shards; `padded` must be a multiple of `ranks`.
VocabShard vocab_shard(int64_t padded, int ranks, int rank);

/// Merges the ranks' statistics of one token. `owner` is the rank whose shard has the target, or
/// -1: then logprob is 0. shards [ranks]: statistics in rank order, `stride` apart.
struct LogprobEntropy {
  float logprob = 0;
  float entropy = 0;  ///< nats, >= 0
};
LogprobEntropy merge_statistics(const RowStatistics* shards, int64_t ranks, int64_t stride,
                                int64_t owner);

/// For every token: log-probability of its target (0 when the target is negative: no target) and
/// entropy, on all ranks of `group`. statistics, targets, out [tokens]. Shards are those of
/// vocab_shard(vocab_padded, ...). Collective.
double vocab_parallel_scores(std::span<const RowStatistics> statistics,
                             std::span<const int32_t> targets, int64_t vocab_padded,
                             Communicator& group, Stream& stream, std::span<LogprobEntropy> out);

}  // namespace gyre
