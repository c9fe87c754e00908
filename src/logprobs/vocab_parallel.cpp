#include "logprobs/vocab_parallel.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.hpp"
#include "runtime/buffer.hpp"
#include "runtime/clock.hpp"

namespace gyre {

VocabShard vocab_shard(int64_t padded, int ranks, int rank) {
  GYRE_CHECK(padded % ranks == 0, "vocabulary of {} columns over {} ranks", padded, ranks);
  return {padded / ranks * rank, padded / ranks};
}

LogprobEntropy merge_statistics(const RowStatistics* shards, int64_t ranks, int64_t stride,
                                int64_t owner) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  float top = none;
  for (int64_t r = 0; r < ranks; ++r) top = std::max(top, shards[r * stride].max);
  double sum = 0, weighted = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    const RowStatistics& part = shards[r * stride];
    if (part.max == none) continue;  // no visible column in this shard
    const double shift = static_cast<double>(part.max) - static_cast<double>(top);
    const double factor = std::exp(shift);
    sum += part.sum * factor;
    weighted += (part.weighted + shift * part.sum) * factor;
  }
  const double log_sum = std::log(sum);
  LogprobEntropy score;
  const double entropy = log_sum - weighted / sum;
  score.entropy =
      static_cast<float>(entropy < 0 ? 0 : entropy);  // rounding may dip below 0; NaN stays
  if (owner >= 0)
    score.logprob = static_cast<float>(
        (static_cast<double>(shards[owner * stride].target) - static_cast<double>(top)) - log_sum);
  return score;
}

double vocab_parallel_scores(std::span<const RowStatistics> statistics,
                             std::span<const int32_t> targets, int64_t vocab_padded,
                             Communicator& group, Stream& stream, std::span<LogprobEntropy> out) {
  const int64_t tokens = std::ssize(statistics), ranks = group.size();
  GYRE_CHECK(std::ssize(targets) == tokens && std::ssize(out) == tokens,
             "{} tokens, {} targets, {} outputs", tokens, targets.size(), out.size());
  const int64_t shard = vocab_padded / ranks;
  Buffer<RowStatistics> all(ranks == 1 ? 0 : ranks * tokens);
  const RowStatistics* gathered = statistics.data();
  double waited = 0;
  if (ranks > 1) {
    const Stopwatch watch;
    group.all_gather(bytes_of(statistics), writable_bytes_of(all.span()), stream, "row statistics")
        ->wait();
    gathered = all.data();
    waited = watch.seconds();
  }
  for (int64_t i = 0; i < tokens; ++i) {
    const int32_t target = targets[static_cast<size_t>(i)];
    out[static_cast<size_t>(i)] =
        merge_statistics(gathered + i, ranks, tokens, target < 0 ? -1 : target / shard);
  }
  return waited;
}

}  // namespace gyre
