// Search of balanced_bins: improves pairs of a costly and a cheap bin.

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "packing/bins_detail.hpp"

namespace gyre::detail {
namespace {

constexpr int partners_tried = 128;
constexpr int64_t items_picked_from = 24;  // candidates of each bin in an exchange

/// Deals the items of a and b to x and y, longest first, each to the cheaper one with room. False
/// when an item fits in neither.
bool split_anew(const CostBin& a, const CostBin& b, int64_t capacity, CostBin& x, CostBin& y) {
  std::vector<Item> pool(a.items.size() + b.items.size());
  std::merge(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(), pool.begin(),
             comes_first);
  for (const Item& item : pool) {
    const bool x_first = std::pair(x.cost, x.items.size()) <= std::pair(y.cost, y.items.size());
    CostBin& cheap = x_first ? x : y;
    CostBin& dear = x_first ? y : x;
    if (cheap.takes(item, capacity))
      cheap.add(item);
    else if (dear.takes(item, capacity))
      dear.add(item);
    else
      return false;
  }
  return true;
}

/// Up to two of the longest items of a bin.
struct Pick {
  int64_t load = 0;
  int64_t cost = 0;
  int64_t first = -1;  ///< position in the bin; -1: none
  int64_t second = -1;
};

/// All picks from the longest items, sorted by ascending load.
std::vector<Pick> picks_of(const CostBin& bin) {
  std::vector<Pick> picks = {{}};
  const int64_t count = std::min<int64_t>(items_picked_from, std::ssize(bin.items));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = bin.items[i].length;
    picks.push_back({length, cost_of(length), i, -1});
    for (int64_t j = 0; j < i; ++j) {
      const int64_t other = bin.items[j].length;
      picks.push_back({length + other, cost_of(length) + cost_of(other), j, i});
    }
  }
  std::sort(picks.begin(), picks.end(), [](const Pick& a, const Pick& b) {
    return std::tie(a.load, a.first, a.second) < std::tie(b.load, b.first, b.second);
  });
  return picks;
}

/// Copies the items of the pick to `given` and the other items of `from` to `kept`.
void deal(const CostBin& from, const Pick& pick, std::vector<Item>& kept,
          std::vector<Item>& given) {
  for (int64_t i = 0; i < std::ssize(from.items); ++i)
    (i == pick.first || i == pick.second ? given : kept).push_back(from.items[i]);
}

CostBin bin_of(std::vector<Item> items) {
  std::sort(items.begin(), items.end(), comes_first);
  CostBin bin;
  for (const Item& item : items) bin.add(item);
  return bin;
}

/// Finds the exchange of up to two items of bin a (the costlier) for up to two of b that minimises
/// the larger cost of the results x, y. False if none is below a.cost. Counts picks in `looked_at`.
bool exchange(const CostBin& a, const CostBin& b, int64_t capacity, CostBin& x, CostBin& y,
              int64_t& looked_at) {
  const std::vector<Pick> from_a = picks_of(a), from_b = picks_of(b);
  looked_at += std::ssize(from_a) + std::ssize(from_b);
  int64_t least = a.cost;
  std::pair<const Pick*, const Pick*> best = {nullptr, nullptr};
  size_t begin = 0;
  for (const Pick& p : from_a) {
    // b must have room for p without q, and a for q without p. Neither bin becomes empty: the other
    // one would hold everything and cost no less than a.
    while (begin < from_b.size() && from_b[begin].load < b.load + p.load - capacity) ++begin;
    for (size_t k = begin; k < from_b.size() && from_b[k].load <= capacity - a.load + p.load; ++k) {
      ++looked_at;
      const Pick& q = from_b[k];
      const int64_t dearer = std::max(a.cost - p.cost + q.cost, b.cost - q.cost + p.cost);
      if (dearer >= least) continue;
      least = dearer;
      best = {&p, &q};
    }
  }
  if (best.first == nullptr) return false;
  std::vector<Item> left, right;
  deal(a, *best.first, left, right);
  deal(b, *best.second, right, left);
  x = bin_of(std::move(left));
  y = bin_of(std::move(right));
  return true;
}

class PairSearch {
 public:
  PairSearch(std::vector<CostBin>& bins, int64_t capacity, int64_t budget)
      : bins_(bins), capacity_(capacity), budget_(budget) {
    for (size_t b = 0; b < bins.size(); ++b)
      if (bins[b].load <= capacity) order_.emplace(bins[b].cost, b);
  }
  void run() {
    while (order_.size() > 1 && budget_ > 0) {
      const auto costliest = std::prev(order_.end());
      if (bins_[costliest->second].items.size() == 1 || !improve(costliest->second))
        order_.erase(std::prev(order_.end()));
    }
  }

 private:
  bool improve(size_t dear) {
    int tries = 0;
    for (auto cheap = order_.begin(); tries < partners_tried && cheap->second != dear;
         ++cheap, ++tries) {
      CostBin &a = bins_[dear], &b = bins_[cheap->second];
      CostBin x, y;
      if (!improve_pair(a, b, x, y)) continue;
      order_.erase({a.cost, dear});
      const size_t partner = cheap->second;
      order_.erase(cheap);
      a = std::move(x);
      b = std::move(y);
      order_.emplace(a.cost, dear);
      order_.emplace(b.cost, partner);
      return true;
    }
    return false;
  }

  bool improve_pair(const CostBin& a, const CostBin& b, CostBin& x, CostBin& y) {
    budget_ -= std::ssize(a.items) + std::ssize(b.items);
    if (split_anew(a, b, capacity_, x, y) && std::max(x.cost, y.cost) < a.cost) return true;
    int64_t looked_at = 0;
    const bool improved = exchange(a, b, capacity_, x, y, looked_at);
    budget_ -= looked_at;
    return improved;
  }

  std::vector<CostBin>& bins_;
  int64_t capacity_;
  int64_t budget_;
  std::set<std::pair<int64_t, size_t>> order_;  // (cost, bin) of bins that can still improve
};

}  // namespace

void even_out_costs(std::vector<CostBin>& bins, int64_t capacity, int64_t budget) {
  PairSearch(bins, capacity, budget).run();
}

}  // namespace gyre::detail
