#include "sharding/padded_layout.hpp"

#include <limits>

#include "core/error.hpp"

namespace gyre {

PaddedLayout::PaddedLayout(std::span<const int64_t> offsets, const LayoutKind& kind,
                           const LayoutOptions& options) {
  const int64_t multiple = kind.segment_multiple(options.cp);
  int64_t slots = 0;
  for (size_t d = 0; d + 1 < offsets.size(); ++d) {
    slots += round_up(offsets[d + 1] - offsets[d], multiple);
    if (slots > std::numeric_limits<int32_t>::max())
      throw_usage("document {} ends beyond slot 2^31 - 1 when documents take multiples of {} slots",
                  d, multiple);
    real.push_back(static_cast<int32_t>(offsets[d + 1] - offsets[0]));
    padded.push_back(static_cast<int32_t>(slots));
  }
  layout = kind.make({real, padded}, options);
}

namespace {

/// Tokens of the same documents in two layouts: a rank holds its slots of `first`, then those of
/// `rest`, and so does the stream.
Layout joined(const Layout& first, const Layout& rest) {
  Layout all = first;
  all.stream_slots = first.padded_slots + rest.stream_slots;
  all.padded_slots = first.padded_slots + rest.padded_slots;
  for (int r = 0; r < all.cp(); ++r) {
    Shard& shard = all.shards[r];
    const int64_t own = shard.slots;
    for (SlotRun run : rest.shard(r).runs) {
      run.start = run.start + first.padded_slots;
      run.local_begin = run.local_begin + own;
      shard.runs.push_back(run);
    }
    for (Fragment fragment : rest.shard(r).fragments) {
      fragment.local_begin = fragment.local_begin + own;
      shard.fragments.push_back(fragment);
    }
    shard.slots += rest.shard(r).slots;
  }
  return all;
}

}  // namespace

QueryLayouts::QueryLayouts(std::span<const int64_t> offsets, std::span<const int64_t> query_offsets,
                           const LayoutKind& kind, const LayoutOptions& options) {
  if (query_offsets.empty()) {
    layout = PaddedLayout(offsets, kind, options).layout;
    return;
  }
  std::vector<int64_t> earlier, earlier_offsets = {0};
  for (size_t d = 0; d + 1 < offsets.size(); ++d) {
    earlier.push_back(offsets[d + 1] - offsets[d] - (query_offsets[d + 1] - query_offsets[d]));
    earlier_offsets.push_back(earlier_offsets.back() + earlier.back());
  }
  LayoutOptions of_earlier = options, of_queries = options;
  of_earlier.pairs = {};  // those of the queries that these tokens had
  if (options.pairs)
    of_queries.pairs = [&](int64_t document, int64_t queries) {
      return options.pairs(document, earlier[document] + queries);
    };
  query_layout = PaddedLayout(query_offsets, kind, of_queries).layout;
  for (Shard& shard : query_layout->shards)
    for (Fragment& fragment : shard.fragments)
      fragment.start = fragment.start + earlier[fragment.segment];
  layout = joined(PaddedLayout(earlier_offsets, kind, of_earlier).layout, *query_layout);
}

}  // namespace gyre
