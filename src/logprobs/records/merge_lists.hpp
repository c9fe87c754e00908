#pragma once
// Merges the lists of the largest logits that ranks made of their columns.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>

namespace gyre {

/// Calls take(k, rank, i) for the k-th largest of all entries, k = 0 to count - 1: entry i of the
/// rank's list. Each list has `entries` in descending order; entry(rank, i) is a value and an id,
/// which is negative behind the last. NaN is the largest. Of equal values, those of lower ranks
/// come first: lower ranks hold lower ids. heads [ranks] is scratch.
template <class Entry, class Take>
void merge_lists(std::span<int64_t> heads, int64_t entries, int64_t count, Entry entry, Take take) {
  std::ranges::fill(heads, 0);
  for (int64_t k = 0; k < count; ++k) {
    int64_t best = -1;
    float value = 0;
    for (int64_t r = 0; r < std::ssize(heads); ++r) {
      const int64_t head = heads[r];
      if (head == entries) continue;
      const std::pair<float, int32_t> next = entry(r, head);
      if (next.second < 0 || (best >= 0 && (std::isnan(value) || value >= next.first))) continue;
      best = r, value = next.first;
    }
    take(k, best, heads[best]++);
  }
}

}  // namespace gyre
