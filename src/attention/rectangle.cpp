#include "attention/rectangle.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace gyre {
namespace {

/// Replaces equal strides by 1, by counting positions in strides. Returns false if the window is
/// shorter than a stride and lies between two keys, so that no query sees any.
bool normalise(Mask& mask) {
  if (mask.q_stride != mask.k_stride || mask.q_stride == 1) return true;
  const int64_t stride = mask.q_stride, last = floor_div(mask.offset, stride);
  const int64_t first = floor_div(mask.offset - mask.window, stride) + 1;
  mask.q_stride = mask.k_stride = 1;
  if (mask.causal) {
    mask.offset = last;
    if (mask.window == 0) return true;
    mask.window = last - first + 1;
    return mask.window > 0;
  }
  mask.offset = first;
  mask.window = 1;
  return true;
}

/// Drops queries at both ends that see no key, then keys that no remaining query sees.
void trim(Rectangle& r) {
  const Mask& mask = r.mask;
  int64_t first = 0, end = r.q_length;
  if (mask.causal) first = std::max<int64_t>(0, ceil_div(-mask.offset, mask.q_stride));
  if (mask.window > 0) {
    const int64_t reach = (r.k_length - 1) * mask.k_stride + mask.window - 1;  // last position
    end = std::min(end, floor_div(reach - mask.offset, mask.q_stride) + 1);
  }
  r.q_length = std::max<int64_t>(0, end - first);
  if (r.q_length == 0) return;
  const int64_t k_first = std::clamp<int64_t>(mask.begin_key(first), 0, r.k_length);
  const int64_t k_end = std::clamp<int64_t>(mask.end_key(end - 1), k_first, r.k_length);
  r.q_begin += first;
  r.k_begin += k_first;
  r.k_length = k_end - k_first;
  r.mask.offset += first * mask.q_stride - k_first * mask.k_stride;
}

/// Rows [first, first + count) of a fragment: those with positions in [begin, end).
struct FragmentPart {
  int64_t first, count;
  FragmentPart(const Fragment& f, int64_t begin, int64_t end) {
    const int64_t start = f.start.value(), last = start + (f.length - 1) * f.stride;
    first = begin <= start ? 0 : ceil_div(begin - start, f.stride);
    count = (end > last ? f.length : ceil_div(end - start, f.stride)) - first;
  }
};

/// The mask of a region, relative to a corner at query position q and key position k.
Mask mask_at(const Region& region, int64_t q, int64_t q_stride, int64_t k, int64_t k_stride) {
  const int64_t last = region.k_end - region.q_end, first = region.k_begin - region.q_begin;
  switch (region.kind) {
    case RegionKind::full:
      break;
    case RegionKind::causal:
      return {true, q + last - k, q_stride, k_stride, region.window};
    case RegionKind::inverse:
      return {false, q + first - k, q_stride, k_stride, 1};
    case RegionKind::both: {
      const int64_t width = last - first + 1;
      return {true, q + last - k, q_stride, k_stride,
              region.window == 0 ? width : std::min(width, region.window)};
    }
  }
  return {};
}

/// The rectangle of two fragments in one region; has no visible pair if they have none there.
Rectangle intersect(const Fragment& q, const Fragment& k, const Region& region, Trim trimming) {
  const FragmentPart queries(q, region.q_begin, region.q_end);
  const FragmentPart keys(k, region.k_begin, region.k_end);
  if (queries.count <= 0 || keys.count <= 0) return {};
  Rectangle r{q.local_begin.value() + queries.first,
              queries.count,
              k.local_begin.value() + keys.first,
              keys.count,
              {}};
  if (region.kind == RegionKind::full) return r;
  r.mask = mask_at(region, q.start.value() + queries.first * q.stride, q.stride,
                   k.start.value() + keys.first * k.stride, k.stride);
  if (region.kind == RegionKind::both && r.mask.window <= 0) return {};
  if (!normalise(r.mask)) return {};
  if (trimming == Trim::both) trim(r);
  if (r.q_length == 0 || r.k_length == 0) return r;
  if (r.mask.end_key(0) >= r.k_length && r.mask.begin_key(r.q_length - 1) <= 0) r.mask = {};
  return r;
}

/// Calls f(region), in order, for the regions of a document that may show a key of `k` to a query
/// of `q`. Where queries select their keys, a document has many short runs. Of these it visits only
/// the runs of queries of `q` that have keys from the first to the last one of `k`.
template <class F>
void for_each_region(const SortedRegions& regions, const Fragment& q, const Fragment& k, F f) {
  const int64_t first = q.start.value(), last = first + (q.length - 1) * q.stride;
  if (!regions.runs) {
    for (const Region& region : regions.of_queries(first, last + 1)) f(region);
    return;
  }
  const int64_t first_key = k.start.value(), last_key = first_key + (k.length - 1) * k.stride;
  for (int64_t p = first; p <= last; p += q.stride) {
    const auto of_query = regions.of_queries(p, p + 1);
    auto region = std::ranges::upper_bound(of_query, first_key, {}, &Region::k_end);
    for (; region != of_query.end() && region->k_begin <= last_key; ++region) f(*region);
  }
}

/// The fragments in a stable order of segments: the argument if it is sorted, else a copy in
/// `sorted`.
std::span<const Fragment> by_segment(const std::vector<Fragment>& fragments,
                                     std::vector<Fragment>& sorted) {
  const auto before = [](const Fragment& a, const Fragment& b) { return a.segment < b.segment; };
  if (std::is_sorted(fragments.begin(), fragments.end(), before)) return fragments;
  sorted = fragments;
  std::stable_sort(sorted.begin(), sorted.end(), before);
  return sorted;
}

}  // namespace

int64_t Rectangle::pairs() const {
  if (mask.full()) return q_length * k_length;
  if (mask.q_stride == 1 && mask.k_stride == 1) {
    const int64_t ends =
        mask.causal ? clamped_ramp(q_length, mask.offset + 1, k_length) : q_length * k_length;
    if (mask.window == 0) return ends;
    return ends - clamped_ramp(q_length, mask.offset + 1 - mask.window, k_length);
  }
  int64_t sum = 0;
  for (int64_t i = 0; i < q_length; ++i)
    sum += std::clamp<int64_t>(mask.end_key(i), 0, k_length) -
           std::clamp<int64_t>(mask.begin_key(i), 0, k_length);
  return sum;
}

std::vector<Rectangle> intersect(const Shard& queries, const Shard& keys, const MaskRule& rule,
                                 Trim trimming) {
  check_mask(rule);
  // Without a table, one document of unlimited length serves all segments.
  const DocumentMask endless(rule.table == nullptr ? rule : MaskRule(), 0, max_positions);
  std::vector<Fragment> sorted;
  const std::span<const Fragment> in_order = by_segment(keys.fragments, sorted);
  std::vector<Rectangle> rectangles;
  for (const Fragment& q : queries.fragments) {
    auto k = std::lower_bound(in_order.begin(), in_order.end(), q.segment,
                              [](const Fragment& f, int64_t s) { return f.segment < s; });
    const SortedRegions regions =
        rule.table == nullptr ? endless.regions() : rule.table->of(q.segment);
    for (; k != in_order.end() && k->segment == q.segment; ++k)
      for_each_region(regions, q, *k, [&](const Region& region) {
        const Rectangle seen = intersect(q, *k, region, trimming);
        if (seen.q_length > 0 && seen.k_length > 0 && seen.pairs() > 0) rectangles.push_back(seen);
      });
  }
  const auto before = [](const Rectangle& a, const Rectangle& b) { return a.q_begin < b.q_begin; };
  if (!std::is_sorted(rectangles.begin(), rectangles.end(), before))
    std::stable_sort(rectangles.begin(), rectangles.end(), before);
  return rectangles;
}

int64_t total_pairs(std::span<const Rectangle> rectangles) {
  int64_t sum = 0;
  for (const Rectangle& r : rectangles) sum += r.pairs();
  return sum;
}

}  // namespace gyre
