#include "packing/bins.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "core/error.hpp"
#include "core/index.hpp"
#include "packing/bins_detail.hpp"
#include "packing/random.hpp"

namespace gyre {

std::optional<LongestAbove> longest_above(std::span<const int64_t> lengths, int64_t most) {
  const auto longest = std::ranges::max_element(lengths);
  if (longest == lengths.end() || *longest <= most) return std::nullopt;
  return LongestAbove{longest - lengths.begin(), *longest,
                      std::ranges::count_if(lengths, [&](int64_t l) { return l > most; })};
}

std::string LongestAbove::others_text() const {
  return count == 1 ? "" : fmt::format(" (the longest of {} that do not fit)", count);
}

namespace detail {

void check_packing(std::string_view packer, std::span<const int64_t> lengths,
                   const BinOptions& options) {
  if (options.capacity < 1)
    throw_usage("bin capacity must be at least 1, not {}", options.capacity);
  if (options.min_bin_count < 0)
    throw_usage("min_bin_count must be at least 0, not {}", options.min_bin_count);
  if (options.bin_count_multiple < 1)
    throw_usage("bin_count_multiple must be at least 1, not {}", options.bin_count_multiple);
  if (options.max_items < 0)
    throw_usage("max_items must be at least 0 (0: any number), not {}", options.max_items);
  if (options.max_items > 0 && packer != "next-fit")
    throw_usage("max_items is an option of next-fit: {} takes only 0, not {}", packer,
                options.max_items);
  for (size_t i = 0; i < lengths.size(); ++i)
    if (lengths[i] < 0) throw_usage("length {} of item {} is negative", lengths[i], i);
  const auto oversized = longest_above(lengths, options.capacity);
  if (oversized && options.oversize == Oversize::reject)
    throw_usage("length {} of item {} exceeds the bin capacity {}{}", oversized->length,
                oversized->item, options.capacity, oversized->others_text());
}

void check_packing_of_int32(std::string_view packer, std::span<const int64_t> lengths,
                            const BinOptions& options) {
  check_packing(packer, lengths, options);
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (options.capacity > most)
    throw_usage("{}: bin capacity {} exceeds {}", packer, options.capacity, most);
  for (size_t i = 0; i < lengths.size(); ++i)
    if (lengths[i] > most)
      throw_usage("{}: length {} of item {} exceeds {}", packer, lengths[i], i, most);
}

std::vector<Item> longest_first(std::span<const int64_t> lengths) {
  std::vector<Item> items;
  items.reserve(lengths.size());
  for (int64_t length : lengths) items.push_back({length, std::ssize(items)});
  std::sort(items.begin(), items.end(), comes_first);
  return items;
}

namespace {

/// Segment tree of the largest free room, so that "first bin with room for n" costs O(log bins).
/// Bins that do not exist yet have room -1.
class RoomTree {
 public:
  int64_t room(int64_t bin) { return at(leaves_ + bin); }
  void set(int64_t bin, int64_t room) {
    while (bin >= leaves_) grow();
    int64_t node = leaves_ + bin;
    at(node) = room;
    for (node /= 2; node >= 1; node /= 2) at(node) = std::max(at(2 * node), at(2 * node + 1));
  }
  /// The first bin with room for `length`, or -1.
  int64_t first_fit(int64_t length) {
    if (at(1) < length) return -1;
    int64_t node = 1;
    while (node < leaves_) node = at(2 * node) >= length ? 2 * node : 2 * node + 1;
    return node - leaves_;
  }

 private:
  int64_t& at(int64_t node) { return room_[node]; }
  void grow() {
    const std::vector<int64_t> old(room_.begin() + leaves_, room_.end());
    leaves_ *= 2;
    room_.assign(2 * leaves_, -1);
    std::copy(old.begin(), old.end(), room_.begin() + leaves_);
    for (int64_t node = leaves_ - 1; node >= 1; --node)
      at(node) = std::max(at(2 * node), at(2 * node + 1));
  }
  int64_t leaves_ = 1;
  std::vector<int64_t> room_ = {-1, -1};
};

}  // namespace

std::vector<Bin> first_fit_of(std::span<const Item> items, int64_t capacity) {
  std::vector<Bin> bins;
  RoomTree rooms;
  for (const Item& item : items) {
    int64_t bin = rooms.first_fit(item.length);
    if (bin < 0) {
      bin = std::ssize(bins);
      bins.emplace_back();
      rooms.set(bin, room_of_new_bin(capacity, item.length));
    }
    bins[bin].push_back(item.index);
    rooms.set(bin, rooms.room(bin) - item.length);
  }
  return bins;
}

}  // namespace detail

namespace {

using detail::Item;

std::vector<Bin> first_fit_by_scan(std::span<const Item> items, int64_t capacity) {
  std::vector<Bin> bins;
  std::vector<int64_t> room;
  for (const Item& item : items) {
    size_t bin = 0;
    while (bin < bins.size() && room[bin] < item.length) ++bin;
    if (bin == bins.size()) {
      bins.emplace_back();
      room.push_back(detail::room_of_new_bin(capacity, item.length));
    }
    bins[bin].push_back(item.index);
    room[bin] -= item.length;
  }
  return bins;
}

std::vector<Item> shuffled(std::span<const int64_t> lengths, uint64_t seed) {
  std::vector<Item> items;
  items.reserve(lengths.size());
  for (int64_t length : lengths) items.push_back({length, std::ssize(items)});
  RandomBits random(seed);
  for (size_t i = items.size(); i > 1; --i)
    std::swap(items[i - 1], items[uniform_below(random, i)]);
  return items;
}

}  // namespace

std::vector<Bin> next_fit(std::span<const int64_t> lengths, const BinOptions& options) {
  detail::check_packing("next-fit", lengths, options);
  std::vector<Bin> bins;
  int64_t room = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const bool full = bins.empty() || lengths[i] > room ||
                      (options.max_items > 0 && std::ssize(bins.back()) >= options.max_items);
    if (full) {
      bins.emplace_back();
      room = detail::room_of_new_bin(options.capacity, lengths[i]);
    }
    bins.back().push_back(i);
    room -= lengths[i];
  }
  return adjust_bin_count(std::move(bins), options);
}

std::vector<Bin> first_fit_decreasing(std::span<const int64_t> lengths, const BinOptions& options) {
  detail::check_packing("first-fit-decreasing", lengths, options);
  return adjust_bin_count(detail::first_fit_of(detail::longest_first(lengths), options.capacity),
                          options);
}

std::vector<Bin> first_fit_decreasing_reference(std::span<const int64_t> lengths,
                                                const BinOptions& options) {
  detail::check_packing("first-fit-decreasing", lengths, options);
  return adjust_bin_count(first_fit_by_scan(detail::longest_first(lengths), options.capacity),
                          options);
}

std::vector<Bin> first_fit_shuffle(std::span<const int64_t> lengths, const BinOptions& options) {
  detail::check_packing("first-fit-shuffle", lengths, options);
  return adjust_bin_count(detail::first_fit_of(shuffled(lengths, options.seed), options.capacity),
                          options);
}

std::vector<Bin> first_fit_shuffle_reference(std::span<const int64_t> lengths,
                                             const BinOptions& options) {
  detail::check_packing("first-fit-shuffle", lengths, options);
  return adjust_bin_count(first_fit_by_scan(shuffled(lengths, options.seed), options.capacity),
                          options);
}

std::vector<Bin> adjust_bin_count(std::vector<Bin> bins, const BinOptions& options) {
  int64_t items = 0;
  for (const Bin& bin : bins) items += std::ssize(bin);
  const uint64_t target = detail::adjusted_count(bins.size(), options);
  if (static_cast<uint64_t>(items) < target)
    throw_usage(
        "{} items cannot fill {} bins, one each at least (min_bin_count {}, bin_count_multiple "
        "{}); they need {}",
        items, target, options.min_bin_count, options.bin_count_multiple, bins.size());
  std::vector<size_t> order(bins.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return bins[a].size() != bins[b].size() ? bins[a].size() > bins[b].size() : a > b;
  });
  bins.reserve(target);
  for (size_t from = 0; bins.size() < target;) {
    Bin& source = bins[order[from]];
    if (source.size() == 1) {
      ++from;
      continue;
    }
    const int64_t item = source.back();
    source.pop_back();
    bins.push_back({item});
  }
  return bins;
}

const std::vector<BinPacker>& bin_packers() {
  static const std::vector<BinPacker> packers = {
      {"next-fit", "in order of input; the first item that does not fit closes the bin", next_fit},
      {"first-fit-decreasing", "longest first, into the first bin with room", first_fit_decreasing},
      {"first-fit-shuffle", "in random order, into the first bin with room", first_fit_shuffle},
      {"modified-first-fit-decreasing", "large items first, then what fits beside them",
       modified_first_fit_decreasing},
      {"balanced", "as few bins as the decreasing packers, attention cost evened out",
       balanced_bins},
      {"hybrid", "the bins of the packer with the shortest step on groups of ranks", hybrid_bins,
       true},
  };
  return packers;
}

const BinPacker& find_bin_packer(std::string_view name) {
  std::string plain(name);
  for (char& c : plain) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (c == '_') c = '-';
  }
  std::vector<std::string> names;
  for (const BinPacker& packer : bin_packers()) {
    if (packer.name == plain) return packer;
    names.push_back(packer.name);
  }
  throw_usage("there is no bin packer '{}'; there are {}", name, fmt::join(names, ", "));
}

BinOptions options_for_ranks(BinOptions options, int ranks) {
  if (ranks < 1) throw_usage("bins cannot be dealt to {} ranks; at least 1", ranks);
  options.dp = ranks;
  options.min_bin_count = std::max<int64_t>(options.min_bin_count, ranks);
  options.bin_count_multiple = std::lcm(options.bin_count_multiple, int64_t{ranks});
  return options;
}

std::vector<std::vector<int64_t>> assign_bins_to_ranks(int64_t bins, int ranks) {
  if (ranks < 1) throw_usage("bins cannot be dealt to {} ranks; at least 1", ranks);
  if (bins % ranks != 0)
    throw_usage(
        "{} bins cannot be dealt evenly to {} ranks; "
        "the nearest numbers of bins are {} and {}",
        bins, ranks, bins / ranks * ranks, round_up(bins, ranks));
  std::vector<std::vector<int64_t>> assigned(ranks);
  for (int64_t bin = 0; bin < bins; ++bin) assigned[bin % ranks].push_back(bin);
  return assigned;
}

}  // namespace gyre
