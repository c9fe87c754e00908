#pragma once
// Helpers that the packers share.

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "packing/bins.hpp"

namespace gyre::detail {

/// Throws the usage errors that bins.hpp lists for the packer of this name.
void check_packing(std::string_view packer, std::span<const int64_t> lengths,
                   const BinOptions& options);

/// The same, for a packer that takes lengths and a capacity of at most 2^31 - 1.
void check_packing_of_int32(std::string_view packer, std::span<const int64_t> lengths,
                            const BinOptions& options);

/// Capacity of a new bin whose first item has this length; an oversize item fills it completely.
inline int64_t room_of_new_bin(int64_t capacity, int64_t length) {
  return std::max(capacity, length);
}

struct Item {
  int64_t length;
  int64_t index;
};
/// The order of first-fit decreasing: by (length, index), both descending.
inline bool comes_first(const Item& a, const Item& b) {
  return a.length != b.length ? a.length > b.length : a.index > b.index;
}
std::vector<Item> longest_first(std::span<const int64_t> lengths);

/// The number of bins after adjust_bin_count. Unsigned, so that rounding up the largest options
/// does not overflow.
inline uint64_t adjusted_count(size_t bins, const BinOptions& options) {
  const uint64_t multiple = options.bin_count_multiple;
  const uint64_t least = std::max<uint64_t>(bins, static_cast<uint64_t>(options.min_bin_count));
  return (least + multiple - 1) / multiple * multiple;
}

/// Packings before adjust_bin_count. Precondition: lengths and options are checked.
std::vector<Bin> first_fit_of(std::span<const Item> items, int64_t capacity);
std::vector<Bin> modified_first_fit_of(std::span<const int64_t> lengths, int64_t capacity);

/// Causally visible pairs of an item; for all items of a bin of 2^31 slots, less than 2^62.
inline int64_t cost_of(int64_t length) {
  return length * (length + 1) / 2;
}

struct CostBin {
  std::vector<Item> items;  ///< longest first
  int64_t load = 0;
  int64_t cost = 0;
  void add(const Item& item) {
    items.push_back(item);
    load += item.length;
    cost += cost_of(item.length);
  }
  /// Whether there is room; an empty bin takes any item, however long.
  bool takes(const Item& item, int64_t capacity) const {
    return items.empty() || item.length <= capacity - load;
  }
};

/// Search of balanced_bins: lowers the largest cost in place and examines about `budget` items.
/// Bins above the capacity stay unchanged. Items of a bin are sorted longest first, before and
/// after.
void even_out_costs(std::vector<CostBin>& bins, int64_t capacity, int64_t budget);

}  // namespace gyre::detail
