#include "attention/kernels/joined.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace gyre {
namespace {

bool has_pairs(const Rectangle& r) {
  return r.q_length > 0 && r.k_length > 0;
}

/// Whether the mask is causal, without a window, and hides no key in front of the rectangle.
bool has_diagonal(const Rectangle& r) {
  const Mask& m = r.mask;
  return has_pairs(r) && m.causal && m.window == 0 && m.q_stride == m.k_stride && m.end_key(0) >= 0;
}

/// Moves full rectangles from `from` to the result, without their masks.
std::vector<Rectangle> take_full(std::vector<Rectangle>& from) {
  const auto rest = std::stable_partition(
      from.begin(), from.end(), [](const Rectangle& r) { return !has_pairs(r) || !is_full(r); });
  std::vector<Rectangle> full(rest, from.end());
  from.erase(rest, from.end());
  for (Rectangle& r : full) r.mask = {};
  return full;
}

/// Sorts by `place`, then joins every rectangle that `follows` the one before it.
template <class Place, class Follows>
void join(std::vector<Rectangle>& rectangles, int64_t Rectangle::*length, Place place,
          Follows follows) {
  std::ranges::sort(rectangles, {}, place);
  std::vector<Rectangle> result;
  for (const Rectangle& r : rectangles)
    if (!result.empty() && follows(result.back(), r))
      result.back().*length += r.*length;
    else
      result.push_back(r);
  rectangles = std::move(result);
}

void join_keys(std::vector<Rectangle>& full) {
  join(
      full, &Rectangle::k_length,
      [](const Rectangle& r) { return std::tuple(r.q_begin, r.q_length, r.k_begin); },
      [](const Rectangle& a, const Rectangle& b) {
        return a.q_begin == b.q_begin && a.q_length == b.q_length && a.k_end() == b.k_begin;
      });
}

void join_queries(std::vector<Rectangle>& full) {
  join(
      full, &Rectangle::q_length,
      [](const Rectangle& r) { return std::tuple(r.k_begin, r.k_length, r.q_begin); },
      [](const Rectangle& a, const Rectangle& b) {
        return a.k_begin == b.k_begin && a.k_length == b.k_length && a.q_end() == b.q_begin;
      });
}

/// Returns both, sorted by q_begin.
std::vector<Rectangle> together(std::vector<Rectangle> some, std::span<const Rectangle> others) {
  some.insert(some.end(), others.begin(), others.end());
  std::ranges::stable_sort(some, {}, &Rectangle::q_begin);
  return some;
}

}  // namespace

bool is_full(const Rectangle& r) {
  return r.mask.begin_key(r.q_length - 1) <= 0 && r.mask.end_key(0) >= r.k_length;
}

std::vector<Rectangle> joined(std::span<const Rectangle> rectangles) {
  std::vector<Rectangle> others(rectangles.begin(), rectangles.end());
  std::vector<Rectangle> full = take_full(others);
  join_keys(full);
  join_queries(full);
  return together(std::move(others), full);
}

std::vector<Rectangle> joined_prefixes(std::span<const Rectangle> rectangles) {
  std::vector<Rectangle> others(rectangles.begin(), rectangles.end()), rest;
  const std::vector<Rectangle> full = take_full(others);
  std::multimap<int64_t, Rectangle*> diagonals;  // by their first key
  for (Rectangle& r : others)
    if (has_diagonal(r)) diagonals.emplace(r.k_begin, &r);
  for (const Rectangle& r : full) {
    const auto [first, last] = diagonals.equal_range(r.k_end());
    const auto behind = [&](const auto& entry) {
      return r.q_begin <= entry.second->q_begin && entry.second->q_end() <= r.q_end();
    };
    if (std::count_if(first, last, behind) != 1) {
      rest.push_back(r);
      continue;
    }
    const auto found = std::find_if(first, last, behind);
    Rectangle& diagonal = *found->second;
    diagonals.erase(found);
    if (const int64_t before = diagonal.q_begin - r.q_begin; before > 0)
      rest.push_back({r.q_begin, before, r.k_begin, r.k_length, {}});
    if (const int64_t after = r.q_end() - diagonal.q_end(); after > 0)
      rest.push_back({diagonal.q_end(), after, r.k_begin, r.k_length, {}});
    diagonal.k_begin = r.k_begin;
    diagonal.k_length += r.k_length;
    diagonal.mask.offset += r.k_length * diagonal.mask.k_stride;
  }
  return together(std::move(others), rest);
}

}  // namespace gyre
