#include "sharding/layout.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"

namespace gyre {
namespace {

/// The real tokens of segment `i` in `run` as a fragment; length 0 if there are none.
Fragment fragment_of(const SlotRun& run, const SegmentBounds& bounds, int64_t i) {
  const int64_t begin = bounds.begin(i), end = begin + bounds.real_length(i);
  const int64_t start = run.start.value();
  const int64_t first = std::max<int64_t>(0, ceil_div(begin - start, run.stride));
  const int64_t last = std::min(run.length, ceil_div(end - start, run.stride));
  return {i, DocPosition(start + first * run.stride - begin), run.stride,
          std::max<int64_t>(0, last - first), run.local_begin + first};
}

/// Appends the fragments of one run, by segment.
void add_fragments(std::vector<Fragment>& fragments, const SlotRun& run,
                   const SegmentBounds& bounds) {
  const int64_t last_slot = run.start.value() + (run.length - 1) * run.stride;
  const auto above =
      std::upper_bound(bounds.padded.begin(), bounds.padded.end(), run.start.value());
  for (int64_t i = above - bounds.padded.begin() - 1;
       i < bounds.segments() && bounds.begin(i) <= last_slot; ++i)
    if (const Fragment fragment = fragment_of(run, bounds, i); fragment.length > 0)
      fragments.push_back(fragment);
}

#ifndef NDEBUG
void check_coverage(const Layout& layout) {
  std::vector<bool> seen(layout.padded_slots, false);
  for (int r = 0; r < layout.cp(); ++r)
    for (int32_t slot : shard_index(layout, r)) {
      GYRE_CHECK(slot >= 0 && slot < layout.padded_slots, "layout {}: rank {} owns slot {} of {}",
                 layout.name, r, slot, layout.padded_slots);
      GYRE_CHECK(!seen[slot], "layout {}: slot {} is owned twice", layout.name, slot);
      seen[slot] = true;
    }
}
#endif

}  // namespace

void check_bounds(const SegmentBounds& bounds) {
  if (bounds.real.size() != bounds.padded.size() || bounds.padded.empty())
    throw_usage("segment boundaries: {} real and {} padded entries; both need segments + 1",
                bounds.real.size(), bounds.padded.size());
  if (bounds.real.front() != 0 || bounds.padded.front() != 0)
    throw_usage("segment boundaries must start at 0, not at {} (real) and {} (padded)",
                bounds.real.front(), bounds.padded.front());
  for (int64_t i = 0; i < bounds.segments(); ++i) {
    const int64_t real = bounds.real_length(i), slots = bounds.slot_length(i);
    if (real < 0 || slots < real)
      throw_usage("segment {}: real length {} and slot length {}; 0 <= real <= slots must hold", i,
                  real, slots);
  }
}

void check_boundaries(const Layout& layout, std::span<const int32_t> bounds) {
  if (bounds.empty()) throw_usage("no segment boundaries; there are segments + 1, from 0");
  if (bounds.front() != 0)
    throw_usage("segment boundaries must start at 0, not at {}", bounds.front());
  for (size_t i = 0; i + 1 < bounds.size(); ++i)
    if (bounds[i + 1] < bounds[i])
      throw_usage("segment {}: ends at slot {}, before its begin {}", i, bounds[i + 1], bounds[i]);
  if (bounds.back() != layout.stream_slots)
    throw_usage("segment boundaries end at slot {}, but layout {} is of {} slots", bounds.back(),
                layout.name, layout.stream_slots);
}

Layout make_layout(std::string name, const SegmentBounds& bounds,
                   std::vector<std::vector<SlotRun>> runs) {
  Layout layout{std::move(name), {}, bounds.slots(), 0};
  for (std::vector<SlotRun>& mine : runs) {
    Shard shard;
    for (SlotRun& run : mine) {
      if (run.length == 0) continue;
      run.local_begin = LocalToken(shard.slots);
      shard.slots += run.length;
      add_fragments(shard.fragments, run, bounds);
      shard.runs.push_back(run);
    }
    layout.padded_slots += shard.slots;
    layout.shards.push_back(std::move(shard));
  }
  for (const Shard& shard : layout.shards)
    GYRE_CHECK(shard.slots * layout.cp() == layout.padded_slots,
               "layout {}: a rank has {} slots of {} over {} ranks", layout.name, shard.slots,
               layout.padded_slots, layout.cp());
  if (layout.padded_slots > std::numeric_limits<int32_t>::max())
    throw_usage("layout {}: {} slots exceed the int32 range of index lists", layout.name,
                layout.padded_slots);
#ifndef NDEBUG
  check_coverage(layout);
#endif
  return layout;
}

std::vector<int32_t> shard_index(const Layout& layout, int rank) {
  const Shard& shard = layout.shard(rank);
  std::vector<int32_t> index;
  index.reserve(shard.slots);
  for (const SlotRun& run : shard.runs)
    for (int64_t k = 0; k < run.length; ++k)
      index.push_back(static_cast<int32_t>(run.start.value() + k * run.stride));
  return index;
}

std::vector<Owner> slot_owners(const Layout& layout) {
  std::vector<Owner> owners(layout.padded_slots);
  for (int r = 0; r < layout.cp(); ++r)
    for (const SlotRun& run : layout.shard(r).runs)
      for (int64_t k = 0; k < run.length; ++k)
        owners[run.start.value() + k * run.stride] = {
            r, static_cast<int32_t>(run.local_begin.value() + k)};
  return owners;
}

std::vector<int32_t> segment_ids(std::span<const int32_t> bounds) {
  std::vector<int32_t> ids;
  ids.reserve(bounds.back());
  for (size_t i = 0; i + 1 < bounds.size(); ++i)
    ids.insert(ids.end(), bounds[i + 1] - bounds[i], static_cast<int32_t>(i));
  return ids;
}

}  // namespace gyre
