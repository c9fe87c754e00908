#include "attention/rectangle.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace gyre {
namespace {

/// Sum over i in [0, n) of clamp(i + first, 0, cap), cap >= 0.
int64_t clamped_ramp(int64_t n, int64_t first, int64_t cap) {
  const int64_t rising_begin = std::clamp<int64_t>(-first, 0, n);
  const int64_t rising_end = std::clamp<int64_t>(cap - first, rising_begin, n);
  const int64_t count = rising_end - rising_begin;
  return count * (rising_begin + first) + count * (count - 1) / 2 + (n - rising_end) * cap;
}

/// Equal strides are as good as strides of 1: positions are counted in strides. False if the window
/// is so short that no key of these residues lies in it.
bool normalise(Mask& mask) {
  if (mask.q_stride != mask.k_stride || mask.q_stride == 1) return true;
  const int64_t stride = mask.q_stride, whole = floor_div(mask.offset, stride);
  const int64_t rest = mask.offset - whole * stride;
  mask.q_stride = mask.k_stride = 1;
  mask.offset = whole;
  if (mask.window == 0) return true;
  mask.window = ceil_div(mask.window - rest, stride);
  return mask.window > 0;
}

/// Leaves out queries that see none of the keys at both ends, then keys that none of the rest sees.
void trim(Rectangle& r) {
  const Mask& mask = r.mask;
  const int64_t first = std::max<int64_t>(0, ceil_div(-mask.offset, mask.q_stride));
  int64_t end = r.q_length;
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

/// The visible part of one pair of fragments; no queries or no keys if there is none.
Rectangle intersect(const Fragment& q, const Fragment& k, const MaskRule& rule, Trim trimming) {
  Rectangle r{q.local_begin, q.length, k.local_begin, k.length, {}};
  if (rule.kind == MaskKind::full) return r;
  r.mask = {true, q.start - k.start, q.stride, k.stride, rule.window};
  if (!normalise(r.mask)) return {};
  if (trimming == Trim::both) trim(r);
  if (r.q_length == 0 || r.k_length == 0) return r;
  if (r.mask.end_key(0) >= r.k_length && r.mask.begin_key(r.q_length - 1) <= 0) r.mask = {};
  return r;
}

/// The fragments by segment and then in their order: themselves where they are sorted already, else
/// a copy in `sorted`.
std::span<const Fragment> by_segment(const std::vector<Fragment>& fragments,
                                     std::vector<Fragment>& sorted) {
  const auto before = [](const Fragment& a, const Fragment& b) { return a.segment < b.segment; };
  if (std::is_sorted(fragments.begin(), fragments.end(), before)) return fragments;
  sorted = fragments;
  std::stable_sort(sorted.begin(), sorted.end(), before);
  return sorted;
}

}  // namespace

int64_t visible_pairs(int64_t length, const MaskRule& rule) {
  if (rule.kind == MaskKind::full) return length * length;
  const int64_t n = rule.window == 0 ? length : std::min(rule.window, length);
  return n * (n + 1) / 2 + (length - n) * n;
}

int64_t Rectangle::pairs() const {
  if (!mask.causal) return q_length * k_length;
  if (mask.q_stride == 1 && mask.k_stride == 1) {
    const int64_t seen = clamped_ramp(q_length, mask.offset + 1, k_length);
    if (mask.window == 0) return seen;
    return seen - clamped_ramp(q_length, mask.offset + 1 - mask.window, k_length);
  }
  int64_t sum = 0;
  for (int64_t i = 0; i < q_length; ++i)
    sum += std::clamp<int64_t>(mask.end_key(i), 0, k_length) -
           std::clamp<int64_t>(mask.begin_key(i), 0, k_length);
  return sum;
}

std::vector<Rectangle> intersect(const Shard& queries, const Shard& keys, const MaskRule& rule,
                                 Trim trimming) {
  GYRE_CHECK(rule.window >= 0 && (rule.window == 0 || rule.kind == MaskKind::causal),
             "a window of {} without a causal mask", rule.window);
  std::vector<Fragment> sorted;
  const std::span<const Fragment> in_order = by_segment(keys.fragments, sorted);
  std::vector<Rectangle> rectangles;
  for (const Fragment& q : queries.fragments) {
    auto k = std::lower_bound(in_order.begin(), in_order.end(), q.segment,
                              [](const Fragment& f, SegmentIndex s) { return f.segment < s; });
    for (; k != in_order.end() && k->segment == q.segment; ++k) {
      const Rectangle seen = intersect(q, *k, rule, trimming);
      if (seen.q_length > 0 && seen.k_length > 0 && seen.pairs() > 0) rectangles.push_back(seen);
    }
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
