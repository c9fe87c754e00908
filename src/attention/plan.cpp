#include "attention/plan.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace gyre {
namespace {

int64_t floor_div(int64_t a, int64_t b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}

/// Sum over i in [0, n) of clamp(i + first, 0, cap), cap >= 0.
int64_t clamped_ramp(int64_t n, int64_t first, int64_t cap) {
  const int64_t rising_begin = std::clamp<int64_t>(-first, 0, n);
  const int64_t rising_end = std::clamp<int64_t>(cap - first, rising_begin, n);
  const int64_t count = rising_end - rising_begin;
  return count * (rising_begin + first) + count * (count - 1) / 2 + (n - rising_end) * cap;
}

/// The visible part of one pair of fragments, or length 0.
Rectangle intersect(const Fragment& q, const Fragment& k, MaskKind kind) {
  Rectangle all{q.local_begin, q.length, k.local_begin, k.length, {}};
  if (kind == MaskKind::full) return all;
  GYRE_CHECK(q.stride == k.stride, "fragments of segment {} with strides {} and {}",
             q.segment.value(), q.stride, k.stride);
  // key j visible to query i  <=>  k.start + j·s <= q.start + i·s  <=>  j <= i + diagonal
  const int64_t diagonal = floor_div(q.start - k.start, q.stride);
  const int64_t blind =
      std::clamp<int64_t>(-diagonal, 0, q.length);  // queries before the first key
  Rectangle seen{
      q.local_begin + blind, q.length - blind, k.local_begin, 0, {true, diagonal + blind}};
  if (seen.q_length == 0) return seen;
  seen.k_length = std::min(k.length, seen.q_length + seen.mask.diagonal);
  if (seen.mask.diagonal >= seen.k_length - 1) seen.mask = {};
  return seen;
}

}  // namespace

int64_t Rectangle::pairs() const {
  if (!mask.causal) return q_length * k_length;
  return clamped_ramp(q_length, mask.diagonal + 1, k_length);
}

std::vector<Rectangle> intersect(const Shard& queries, const Shard& keys, MaskKind mask) {
  std::vector<Rectangle> rectangles;
  auto first = keys.fragments.begin();
  for (const Fragment& q : queries.fragments) {
    // Both lists are in stream order, so that the keys of one segment are neighbours.
    while (first != keys.fragments.end() && first->segment < q.segment) ++first;
    for (auto k = first; k != keys.fragments.end() && k->segment == q.segment; ++k) {
      const Rectangle seen = intersect(q, *k, mask);
      if (seen.q_length > 0 && seen.k_length > 0) rectangles.push_back(seen);
    }
  }
  std::stable_sort(rectangles.begin(), rectangles.end(),
                   [](const Rectangle& a, const Rectangle& b) { return a.q_begin < b.q_begin; });
  return rectangles;
}

PlanCount count(const RankPlan& plan) {
  PlanCount total;
  for (const Step& s : plan.steps) {
    if (const auto* exchange = std::get_if<step::Exchange>(&s)) {
      ++total.messages;
      total.tokens_sent += exchange->send_tokens;
    } else if (const auto* compute = std::get_if<step::Compute>(&s)) {
      for (const Rectangle& r : compute->rectangles) total.pairs += r.pairs();
    }
  }
  for (size_t i = 1; i < plan.slot_tokens.size(); ++i) total.peak_kv_tokens += plan.slot_tokens[i];
  return total;
}

}  // namespace gyre
