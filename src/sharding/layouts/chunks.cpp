#include "sharding/layouts/chunks.hpp"

#include <cmath>
#include <utility>

namespace gyre {

void check_cp(int cp) {
  if (cp < 1) throw_usage("cp must be at least 1, not {}", cp);
  if (cp > max_ranks) throw_usage("cp must be at most {}, not {}", max_ranks, cp);
}

void check_times(const TimeModel& time) {
  for (const auto& [what, seconds] : {std::pair{"pair", time.seconds_per_pair},
                                      std::pair{"key and value token", time.seconds_per_kv_token}})
    if (!std::isfinite(seconds) || seconds < 0)
      throw_usage("the seconds of a {} must be finite and at least 0, not {}", what, seconds);
}

SlotRun slot_run(int64_t start, int64_t length) {
  return {GlobalToken(start), 1, length, {}};
}

// Checking that the shards cover the stream is not enough: a misaligned boundary can give a perfect
// permutation that splits a segment at the wrong slot.
int64_t chunk_of_segment(const SegmentBounds& bounds, int64_t i, int cp, int chunks) {
  const int64_t slots = bounds.slot_length(i), parts = int64_t{chunks} * cp;
  if (slots % parts != 0)
    throw_usage(
        "segment {}: slot length {} is not a multiple of {}cp = {}; the next valid one is {}", i,
        slots, chunks == 1 ? "" : fmt::format("{}·", chunks), parts, round_up(slots, parts));
  return slots / parts;
}

std::vector<int64_t> swapped_chunks(int rank, int cp) {
  return {rank, 2 * cp - 1 - rank};
}

std::vector<SlotRun> swapped_runs(int rank, int cp, int64_t length) {
  std::vector<SlotRun> runs;
  for (const int64_t chunk : swapped_chunks(rank, cp))
    runs.push_back(slot_run(chunk * length, length));
  return runs;
}

}  // namespace gyre
