// Modified first-fit decreasing: the five steps of bins.hpp.

#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>

#include "core/error.hpp"
#include "packing/bins_detail.hpp"

namespace gyre {
namespace {

using detail::Item;

/// Sorted items that are removed one by one. Finds the next remaining item at or after position p
/// and the last one at or before p in nearly constant time (two union-find forests).
class Shelf {
 public:
  explicit Shelf(std::vector<Item> items) : items_(std::move(items)) {
    // Position p is stored at p + 1, so that "none" on either side is an entry too.
    after_.resize(items_.size() + 2);
    std::iota(after_.begin(), after_.end(), int64_t{0});
    before_ = after_;
    left_ = std::ssize(items_);
  }
  int64_t left() const { return left_; }
  const Item& item(int64_t position) const { return items_[position]; }
  /// The first remaining position from `position` on, or size().
  int64_t next(int64_t position) { return root(after_, position + 1) - 1; }
  /// The last remaining position up to `position`, or -1.
  int64_t previous(int64_t position) { return root(before_, position + 1) - 1; }
  int64_t size() const { return std::ssize(items_); }
  Item take(int64_t position) {
    const size_t entry = position + 1;
    after_[entry] = position + 2;
    before_[entry] = position;
    --left_;
    return item(position);
  }
  /// The remaining items, in order.
  std::vector<Item> rest() {
    std::vector<Item> items;
    for (int64_t p = next(0); p < size(); p = next(p + 1)) items.push_back(item(p));
    return items;
  }
  /// First position with a length of at most `most`. Precondition: lengths descend.
  int64_t first_at_most(int64_t most) const {
    return std::partition_point(items_.begin(), items_.end(),
                                [&](const Item& i) { return i.length > most; }) -
           items_.begin();
  }
  /// Last position with a length of at most `most`. Precondition: lengths ascend.
  int64_t last_at_most(int64_t most) const {
    return std::partition_point(items_.begin(), items_.end(),
                                [&](const Item& i) { return i.length <= most; }) -
           items_.begin() - 1;
  }

 private:
  static int64_t root(std::vector<int64_t>& parents, int64_t entry) {
    auto parent = [&](int64_t e) -> int64_t& { return parents[e]; };
    while (parent(entry) != entry) entry = parent(entry) = parent(parent(entry));
    return entry;
  }
  std::vector<Item> items_;
  std::vector<int64_t> after_, before_;
  int64_t left_ = 0;
};

/// Items of each class, ascending by index.
struct Classes {
  std::vector<Item> large, medium, small, tiny;
};

Classes classify(std::span<const int64_t> lengths, int64_t capacity) {
  Classes classes;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const Item item{lengths[i], static_cast<int64_t>(i)};
    // For integers, L > C/k and L > floor(C/k) are equivalent.
    if (item.length > capacity / 2)
      classes.large.push_back(item);
    else if (item.length > capacity / 3)
      classes.medium.push_back(item);
    else if (item.length > capacity / 6)
      classes.small.push_back(item);
    else
      classes.tiny.push_back(item);
  }
  return classes;
}

void sort_descending(std::vector<Item>& items) {
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.length > b.length; });
}
void sort_ascending(std::vector<Item>& items) {
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.length < b.length; });
}

void append(std::vector<Item>& to, const std::vector<Item>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

struct OpenBin {
  std::vector<int64_t> items;
  int64_t room = 0;
  OpenBin(const Item& first, int64_t capacity)
      : items{first.index}, room(detail::room_of_new_bin(capacity, first.length) - first.length) {}
  void add(const Item& item) {
    items.push_back(item.index);
    room -= item.length;
  }
};

void add_mediums(std::vector<OpenBin>& bins, Shelf& medium) {
  for (OpenBin& bin : bins) {
    const int64_t position = medium.next(medium.first_at_most(bin.room));
    if (position == medium.size()) continue;
    bin.add(medium.take(position));
  }
}

/// Step 3. A bin with a medium item has less than C/6 left, where no two small items fit.
void add_pairs_of_smalls(std::vector<OpenBin>& bins, Shelf& small) {
  for (auto bin = bins.rbegin(); bin != bins.rend(); ++bin) {
    if (small.left() < 2) return;
    const int64_t first = small.next(0), second = small.next(first + 1);
    if (small.item(first).length + small.item(second).length > bin->room) continue;
    bin->add(small.take(first));
    bin->add(small.take(small.previous(small.last_at_most(bin->room))));
  }
}

void fill_greedily(std::vector<OpenBin>& bins, Shelf& rest) {
  for (OpenBin& bin : bins) {
    for (;;) {
      const int64_t position = rest.next(rest.first_at_most(bin.room));
      if (position == rest.size()) break;
      bin.add(rest.take(position));
    }
  }
}

/// Step 5 for items in descending order. The top of the heap is the emptiest bin; of equally empty
/// bins, the one that was filled first.
std::vector<Bin> emptiest_fit(std::span<const Item> items, int64_t capacity) {
  using Entry = std::tuple<int64_t, int64_t, size_t>;  // load, when it was filled, bin
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> heap;
  std::vector<Bin> bins;
  int64_t now = 0;
  for (const Item& item : items) {
    int64_t load = 0;
    size_t bin = bins.size();
    if (!heap.empty() && item.length <= capacity - std::get<0>(heap.top())) {
      std::tie(load, std::ignore, bin) = heap.top();
      heap.pop();
    } else {
      bins.emplace_back();
    }
    bins[bin].push_back(item.index);
    heap.emplace(load + item.length, now++, bin);
  }
  std::vector<Bin> ordered;
  for (; !heap.empty(); heap.pop()) ordered.push_back(std::move(bins[std::get<2>(heap.top())]));
  return ordered;
}

/// Removes the first item whose length is at most `most` and adds it to the bin.
bool move_first_at_most(int64_t most, std::vector<Item>& from, OpenBin& bin) {
  const auto item = std::find_if(from.begin(), from.end(),
                                 [&](const Item& candidate) { return candidate.length <= most; });
  if (item == from.end()) return false;
  bin.add(*item);
  from.erase(item);
  return true;
}

/// Does step 5 with a list of bins sorted by load.
void place_rest_by_scan(std::span<const Item> rest, int64_t capacity, std::vector<Bin>& bins) {
  std::vector<std::pair<int64_t, Bin>> by_load;
  for (const Item& item : rest) {
    std::pair<int64_t, Bin> bin;
    if (!by_load.empty() && item.length <= capacity - by_load.front().first) {
      bin = by_load.front();
      by_load.erase(by_load.begin());
    }
    bin.first += item.length;
    bin.second.push_back(item.index);
    auto place = by_load.begin();
    while (place != by_load.end() && place->first <= bin.first) ++place;
    by_load.insert(place, bin);
  }
  for (const auto& entry : by_load) bins.push_back(entry.second);
}

}  // namespace

std::vector<Bin> detail::modified_first_fit_of(std::span<const int64_t> lengths, int64_t capacity) {
  Classes classes = classify(lengths, capacity);
  sort_descending(classes.large);
  sort_descending(classes.medium);
  sort_ascending(classes.small);
  sort_ascending(classes.tiny);
  std::vector<OpenBin> open;
  open.reserve(classes.large.size());
  for (const Item& item : classes.large) open.emplace_back(item, capacity);
  Shelf medium(std::move(classes.medium)), small(std::move(classes.small));
  add_mediums(open, medium);
  add_pairs_of_smalls(open, small);
  std::vector<Item> rest = medium.rest();
  append(rest, small.rest());
  append(rest, classes.tiny);
  sort_descending(rest);
  Shelf shelf(std::move(rest));
  fill_greedily(open, shelf);
  std::vector<Bin> bins;
  for (OpenBin& bin : open) bins.push_back(std::move(bin.items));
  for (Bin& bin : emptiest_fit(shelf.rest(), capacity)) bins.push_back(std::move(bin));
  return bins;
}

std::vector<Bin> modified_first_fit_decreasing(std::span<const int64_t> lengths,
                                               const BinOptions& options) {
  detail::check_packing("modified-first-fit-decreasing", lengths, options);
  return adjust_bin_count(detail::modified_first_fit_of(lengths, options.capacity), options);
}

std::vector<Bin> modified_first_fit_decreasing_reference(std::span<const int64_t> lengths,
                                                         const BinOptions& options) {
  detail::check_packing("modified-first-fit-decreasing", lengths, options);
  auto [large, medium, small, tiny] = classify(lengths, options.capacity);
  sort_descending(large);
  sort_descending(medium);
  sort_ascending(small);
  sort_ascending(tiny);
  std::vector<OpenBin> open;
  for (const Item& item : large) open.emplace_back(item, options.capacity);
  for (OpenBin& bin : open) move_first_at_most(bin.room, medium, bin);
  for (auto bin = open.rbegin(); bin != open.rend(); ++bin) {
    if (small.size() < 2 || small[0].length + small[1].length > bin->room) continue;
    bin->add(small.front());
    small.erase(small.begin());
    size_t largest = small.size() - 1;
    while (small[largest].length > bin->room) --largest;
    bin->add(small[largest]);
    small.erase(small.begin() + largest);
  }
  append(medium, small);
  append(medium, tiny);
  sort_descending(medium);
  for (OpenBin& bin : open)
    while (move_first_at_most(bin.room, medium, bin)) continue;
  std::vector<Bin> bins;
  for (const OpenBin& bin : open) bins.push_back(bin.items);
  place_rest_by_scan(medium, options.capacity, bins);
  return adjust_bin_count(std::move(bins), options);
}

}  // namespace gyre
