#include "sharding/layouts.hpp"

#include <fmt/format.h>

#include <limits>

#include "core/error.hpp"

namespace gyre {
namespace {

void check_cp(int cp) {
  if (cp < 1) throw_usage("cp must be at least 1, not {}", cp);
  if (cp > most_ranks) throw_usage("cp must be at most {}, not {}", most_ranks, cp);
}

SlotRun run(int64_t start, int64_t length) {
  return {GlobalToken(start), 1, length, {}};
}

/// Pieces of every rank when `slots` slots are cut into `chunks` equal chunks and rank r owns the
/// chunks that `owned(r)` lists.
template <class Owned>
std::vector<std::vector<SlotRun>> by_chunks(int64_t slots, int cp, int64_t chunks, Owned owned) {
  const int64_t length = slots / chunks;
  std::vector<std::vector<SlotRun>> pieces(static_cast<size_t>(cp));
  for (int r = 0; r < cp; ++r)
    for (const int64_t chunk : owned(r))
      pieces[static_cast<size_t>(r)].push_back(run(chunk * length, length));
  return pieces;
}

/// Chunks of rank r under DualChunkSwap; where they are neighbours (the last rank), two all the
/// same.
std::vector<int64_t> swapped_chunks(int rank, int cp) {
  return {rank, 2 * cp - 1 - rank};
}

}  // namespace

Layout contiguous(const SegmentBounds& bounds, const LayoutOptions& options) {
  check_cp(options.cp);
  check_bounds(bounds);
  return make_layout("contiguous", bounds,
                     by_chunks(round_up(bounds.slots(), options.cp), options.cp, options.cp,
                               [](int r) { return std::vector<int64_t>{r}; }));
}

Layout zigzag(const SegmentBounds& bounds, const LayoutOptions& options) {
  const int cp = options.cp;
  check_cp(cp);
  check_bounds(bounds);
  return make_layout("zigzag", bounds,
                     by_chunks(round_up(bounds.slots(), 2 * cp), cp, 2 * cp,
                               [cp](int r) { return swapped_chunks(r, cp); }));
}

Layout dual_chunk_swap(const SegmentBounds& bounds, int cp) {
  check_cp(cp);
  check_bounds(bounds);
  std::vector<std::vector<SlotRun>> pieces(static_cast<size_t>(cp));
  for (int64_t i = 0; i < bounds.segments(); ++i) {
    const int64_t slots = bounds.slot_length(i), chunk = slots / (2 * cp);
    // "The shards cover the stream" would not be enough of a check: a misaligned boundary can give
    // a perfect permutation that splits a segment at the wrong slot.
    if (slots % (2 * cp) != 0)
      throw_usage(
          "segment {}: slot length {} is not a multiple of 2·cp = {}; the next valid one is {}", i,
          slots, 2 * cp, round_up(slots, 2 * cp));
    for (int r = 0; r < cp; ++r)
      for (const int64_t c : swapped_chunks(r, cp))
        pieces[static_cast<size_t>(r)].push_back(run(bounds.begin(i) + c * chunk, chunk));
  }
  return make_layout("dual-chunk-swap", bounds, std::move(pieces));
}

Layout dual_chunk_swap(const SegmentBounds& bounds, const LayoutOptions& options) {
  return dual_chunk_swap(bounds, options.cp);
}

Layout striped(const SegmentBounds& bounds, const LayoutOptions& options) {
  const int64_t cp = options.cp, stripe = options.stripe;
  check_cp(options.cp);
  check_bounds(bounds);
  constexpr int64_t longest = std::numeric_limits<int32_t>::max();
  if (stripe < 1 || stripe > longest)
    throw_usage("the stripe must be 1 to {} slots, not {}", longest, stripe);
  const int64_t rounds = ceil_div(bounds.slots(), stripe * cp);
  std::vector<std::vector<SlotRun>> pieces(static_cast<size_t>(cp));
  for (int64_t r = 0; r < cp; ++r) {
    std::vector<SlotRun>& mine = pieces[static_cast<size_t>(r)];
    if (stripe == 1)
      mine.push_back({GlobalToken(r), cp, rounds, {}});
    else
      for (int64_t k = 0; k < rounds; ++k) mine.push_back(run((k * cp + r) * stripe, stripe));
  }
  return make_layout("striped", bounds, std::move(pieces));
}

const std::vector<LayoutKind>& layout_kinds() {
  static const std::vector<LayoutKind> kinds = {
      {"contiguous", "equal consecutive parts of the row", contiguous},
      {"zigzag", "chunks r and 2·cp-1-r of the whole row", zigzag},
      {"dual-chunk-swap", "chunks r and 2·cp-1-r of every segment", dual_chunk_swap, 2},
      {"striped", "runs of --stripe slots, round robin", striped},
      {"balanced", "chunks of --chunk slots, equal counts, dealt for equal compute", balanced},
      {"balanced-joint", "the same chunks, dealt for the shortest step: compute or receiving",
       balanced_joint},
  };
  return kinds;
}

const LayoutKind& find_layout(const std::string& name) {
  std::vector<std::string> names;
  for (const LayoutKind& kind : layout_kinds()) {
    if (kind.name == name) return kind;
    names.push_back(kind.name);
  }
  throw_usage("there is no layout '{}'; there are {}", name, fmt::join(names, ", "));
}

}  // namespace gyre
