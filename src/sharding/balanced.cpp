#include "sharding/balanced.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "runtime/clock.hpp"
#include "sharding/joint_search.hpp"
#include "sharding/layouts/chunks.hpp"

namespace gyre {
namespace {

/// Visible pairs of the first n queries of a document.
int64_t causal_triangle(int64_t n) {
  return n * (n + 1) / 2;
}

/// `count` chunks of `chunk` slots cover the row; count is a multiple of cp.
struct Cut {
  int64_t chunk;
  int64_t count;
};

Cut cut_row(const SegmentBounds& bounds, const LayoutOptions& options) {
  check_cp(options.cp);
  check_bounds(bounds);
  constexpr int64_t longest = std::numeric_limits<int32_t>::max();
  if (options.chunk < 0 || options.chunk > longest)
    throw_usage("the chunk must be 1 to {} slots, or 0 for a choice by the row, not {}", longest,
                options.chunk);
  const int64_t chunk =
      options.chunk == 0 ? balanced_chunk(bounds.slots(), options.cp) : options.chunk;
  const int64_t count = round_up(ceil_div(bounds.slots(), chunk), options.cp);
  if (count * chunk > longest)
    throw_usage("{} chunks of {} slots for {} ranks exceed the int32 range of index lists", count,
                chunk, options.cp);
  return {chunk, count};
}

/// Visible pairs of each chunk of a cut; chunks past the end of the row have 0.
std::vector<int64_t> costs_of(const SegmentBounds& bounds, const Cut& cut,
                              const LayoutOptions& options) {
  std::vector<int64_t> costs = chunk_pairs(bounds, cut.chunk, options.pairs);
  costs.resize(cut.count, 0);
  return costs;
}

}  // namespace

int64_t balanced_chunk(int64_t slots, int cp) {
  int64_t chunk = 512;
  while (chunk > 1 && chunk * 16 * cp > slots) chunk /= 2;
  return chunk;
}

std::vector<int64_t> chunk_pairs(const SegmentBounds& bounds, int64_t chunk,
                                 const decltype(LayoutOptions::pairs)& pairs_of) {
  std::vector<int64_t> pairs(ceil_div(bounds.slots(), chunk), 0);
  for (int64_t i = 0; i < bounds.segments(); ++i) {
    const int64_t begin = bounds.begin(i), end = begin + bounds.real_length(i);
    const auto up_to = [&](int64_t slot) {
      return pairs_of ? pairs_of(i, slot - begin) : causal_triangle(slot - begin);
    };
    for (int64_t from = begin; from < end;) {
      const int64_t c = from / chunk, to = std::min(end, (c + 1) * chunk);
      pairs[c] += up_to(to) - up_to(from);
      from = to;
    }
  }
  return pairs;
}

BalanceSearch balance_compute(const SegmentBounds& bounds, const LayoutOptions& options) {
  const double start = thread_cpu_seconds();
  const Cut cut = cut_row(bounds, options);
  BalanceSearch search{assign_equal_counts(costs_of(bounds, cut, options), options.cp), cut.chunk,
                       0};
  search.cpu_seconds = thread_cpu_seconds() - start;
  return search;
}

BalanceSearch balance_joint(const SegmentBounds& bounds, const LayoutOptions& options) {
  const double start = thread_cpu_seconds();
  const Cut cut = cut_row(bounds, options);
  check_times(options.weights());
  BalanceSearch search{{}, cut.chunk, 0};
  if (cut.count > 0)
    search.rank_of_chunk =
        search_joint(chunks_of(bounds, cut.chunk, costs_of(bounds, cut, options)), options.cp,
                     options.weights());
  search.cpu_seconds = thread_cpu_seconds() - start;
  return search;
}

Layout layout_of_assignment(const char* name, const SegmentBounds& bounds, int cp,
                            const BalanceSearch& search) {
  std::vector<std::vector<SlotRun>> runs(cp);
  int64_t start = 0;
  for (const int32_t rank : search.rank_of_chunk) {
    std::vector<SlotRun>& mine = runs[rank];
    if (!mine.empty() && mine.back().start.value() + mine.back().length == start)
      mine.back().length += search.chunk;
    else
      mine.push_back({GlobalToken(start), 1, search.chunk, {}});
    start += search.chunk;
  }
  return make_layout(name, bounds, std::move(runs));
}

}  // namespace gyre
