#pragma once
// One pass over this rank's vocabulary shard of the logits: everything that log-probability and
// entropy need.
//
// Per token, over the valid columns v of the shard:
//     max = max z_v     sum = Σ exp(z_v - max)     weighted = Σ (z_v - max) exp(z_v - max) target =
//     z_t if owned, else 0
// Over all shards (see vocab_parallel.hpp), with m = max of max_r:
//     s = Σ sum_r e^{max_r - m}       t = Σ (weighted_r + (max_r - m) sum_r) e^{max_r - m}
//     log p_target = (z_t - m) - log s        entropy = log s - t / s   (nats, >= 0)
// m and log s are kept apart: their sum would lose the small differences under a large common
// offset. Terms of -inf logits are selected away, never multiplied (0 · log 0 = 0).

#include <cstdint>
#include <span>

#include "core/view.hpp"

namespace gyre {

/// 16 bytes a token: the content of the one collective.
struct RowStatistics {
  float max = 0;
  float sum = 0;
  float weighted = 0;
  float target = 0;
};

/// logits [tokens, columns] of the shard that starts at global column `first_column`; only global
/// columns below `vocab_size` are valid (the rest is padding and takes part in nothing). targets
/// [tokens] are global ids; one outside this shard, or negative (no target), leaves `target` 0. A
/// shard without valid columns gives max = -inf, sum = 0. Vectorised; run-time dispatch.
void row_statistics(MatrixView<const float> logits, int64_t first_column, int64_t vocab_size,
                    std::span<const int32_t> targets, std::span<RowStatistics> out);

/// Log-probability of the target and entropy (double) from a whole row of `vocab_size` logits: the
/// serial twin.
struct TokenScore {
  double logprob = 0;
  double entropy = 0;
};
TokenScore score_row_reference(std::span<const double> logits, int64_t target);

}  // namespace gyre
