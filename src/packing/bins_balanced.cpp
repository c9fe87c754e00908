// Packing for equal attention cost (balanced_bins in bins.hpp): the packings from which the search
// (bins_search.cpp) starts.

#include <algorithm>
#include <optional>
#include <queue>
#include <set>
#include <tuple>

#include "packing/bins_detail.hpp"

namespace gyre {
namespace {

using detail::CostBin;
using detail::Item;

constexpr int64_t work_per_item = 64;  // search budget: items examined per input item
constexpr int64_t least_work = int64_t{1} << 22;

std::vector<CostBin> with_costs(const std::vector<Bin>& bins, std::span<const int64_t> lengths) {
  std::vector<CostBin> result(bins.size());
  for (size_t b = 0; b < bins.size(); ++b) {
    for (int64_t item : bins[b]) result[b].add({lengths[item], item});
    std::sort(result[b].items.begin(), result[b].items.end(), detail::comes_first);
  }
  return result;
}

int64_t largest_cost(const std::vector<CostBin>& bins) {
  int64_t largest = 0;
  for (const CostBin& bin : bins) largest = std::max(largest, bin.cost);
  return largest;
}

/// Places items, longest first. Items of at least `cost_matters` go into the bin of least cost
/// (ties: fewer items, lower bin) that has room. A bin without room for an item waits until items
/// are short enough. Items only become shorter, so a bin waits at most once per item placed in it.
/// Shorter items go where they leave the least room (best fit), which fills bins to the last slot.
class GreedyStart {
 public:
  GreedyStart(size_t count, int64_t capacity) : bins_(count), capacity_(capacity) {
    for (size_t b = 0; b < count; ++b) enter(b);
  }
  /// Returns the bins, or nullopt when an item finds no room. No bin is empty: each of the first
  /// `count` items gets its own bin.
  std::optional<std::vector<CostBin>> place(std::span<const Item> items, int64_t cost_matters) {
    size_t placed = 0;
    for (; placed < items.size(); ++placed) {
      if (placed >= bins_.size() && items[placed].length < cost_matters) break;
      if (!place_by_cost(items[placed])) return std::nullopt;
    }
    std::set<std::pair<int64_t, size_t>> rooms;  // room, bin
    for (size_t b = 0; b < bins_.size(); ++b) rooms.emplace(capacity_ - bins_[b].load, b);
    for (; placed < items.size(); ++placed) {
      const auto tightest = rooms.lower_bound({items[placed].length, 0});
      if (tightest == rooms.end()) return std::nullopt;
      auto entry = rooms.extract(tightest);
      bins_[entry.value().second].add(items[placed]);
      entry.value().first -= items[placed].length;
      rooms.insert(std::move(entry));
    }
    return std::move(bins_);
  }

 private:
  void enter(size_t b) { open_.emplace(bins_[b].cost, bins_[b].items.size(), b); }
  bool place_by_cost(const Item& item) {
    for (; !waiting_.empty() && waiting_.top().first >= item.length; waiting_.pop())
      enter(waiting_.top().second);
    while (!open_.empty()) {
      const size_t b = std::get<2>(open_.top());
      open_.pop();
      if (bins_[b].takes(item, capacity_)) {
        bins_[b].add(item);
        enter(b);
        return true;
      }
      waiting_.emplace(capacity_ - bins_[b].load, b);
    }
    return false;
  }

  using ByCost = std::tuple<int64_t, size_t, size_t>;  // cost, items, bin
  std::vector<CostBin> bins_;
  int64_t capacity_;
  std::priority_queue<ByCost, std::vector<ByCost>, std::greater<>> open_;
  std::priority_queue<std::pair<int64_t, size_t>> waiting_;  // room, bin
};

/// The greedy packing with the smallest threshold `cost_matters` at which all items fit; nullopt if
/// they fit at none.
std::optional<std::vector<CostBin>> greedy_start(std::span<const Item> items, size_t count,
                                                 int64_t capacity) {
  for (int64_t cost_matters :
       {int64_t{0}, capacity / 256, capacity / 64, capacity / 16, capacity / 4}) {
    auto bins = GreedyStart(count, capacity).place(items, cost_matters);
    if (bins) return bins;
  }
  return std::nullopt;
}

}  // namespace

std::vector<Bin> balanced_bins(std::span<const int64_t> lengths, const BinOptions& options) {
  detail::check_packing_of_int32("balanced", lengths, options);
  const std::vector<Item> items = detail::longest_first(lengths);
  std::vector<Bin> fewest = detail::first_fit_of(items, options.capacity);
  std::vector<Bin> other = detail::modified_first_fit_of(lengths, options.capacity);
  if (other.size() < fewest.size()) std::swap(fewest, other);
  fewest = adjust_bin_count(std::move(fewest), options);
  const size_t count = fewest.size();
  std::vector<std::vector<CostBin>> starts;
  if (auto start = greedy_start(items, count, options.capacity))
    starts.push_back(std::move(*start));
  starts.push_back(with_costs(fewest, lengths));
  if (detail::adjusted_count(other.size(), options) == count)
    starts.push_back(with_costs(adjust_bin_count(std::move(other), options), lengths));
  std::vector<CostBin>& best = *std::min_element(
      starts.begin(), starts.end(),
      [](const auto& a, const auto& b) { return largest_cost(a) < largest_cost(b); });
  detail::even_out_costs(best, options.capacity, least_work + work_per_item * std::ssize(lengths));
  std::vector<Bin> bins(count);
  for (size_t b = 0; b < count; ++b)
    for (const Item& item : best[b].items) bins[b].push_back(item.index);
  return bins;
}

}  // namespace gyre
