#include "packing/packing.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/error.hpp"

namespace gyre {
namespace {

/// Most free room per subtree of the bins, so that "first bin with room for n" costs O(log bins).
class RoomTree {
 public:
  explicit RoomTree(int64_t bins) {
    while (leaves_ < bins) leaves_ *= 2;
    room_.assign(static_cast<size_t>(2 * leaves_), -1);
  }
  void set(int64_t bin, int64_t room) {
    int64_t node = leaves_ + bin;
    at(node) = room;
    for (node /= 2; node >= 1; node /= 2) at(node) = std::max(at(2 * node), at(2 * node + 1));
  }
  int64_t room(int64_t bin) { return at(leaves_ + bin); }
  /// The first bin with room for `length`, or -1.
  int64_t first_fit(int64_t length) {
    if (at(1) < length) return -1;
    int64_t node = 1;
    while (node < leaves_) node = at(2 * node) >= length ? 2 * node : 2 * node + 1;
    return node - leaves_;
  }

 private:
  int64_t& at(int64_t node) { return room_[static_cast<size_t>(node)]; }
  int64_t leaves_ = 1;
  std::vector<int64_t> room_;
};

std::vector<int64_t> longest_first(std::span<const int64_t> lengths) {
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const int64_t x = lengths[static_cast<size_t>(a)], y = lengths[static_cast<size_t>(b)];
    return x != y ? x > y : a > b;
  });
  return order;
}

void check_arguments(std::span<const int64_t> lengths, int64_t capacity) {
  if (capacity < 1) throw_usage("bin capacity must be at least 1, not {}", capacity);
  for (size_t i = 0; i < lengths.size(); ++i)
    if (lengths[i] < 0) throw_usage("length {} of item {} is negative", lengths[i], i);
}

}  // namespace

std::vector<Bin> first_fit_decreasing(std::span<const int64_t> lengths, int64_t capacity) {
  check_arguments(lengths, capacity);
  std::vector<Bin> bins;
  RoomTree rooms(std::max<int64_t>(1, std::ssize(lengths)));
  for (int64_t item : longest_first(lengths)) {
    const int64_t length = lengths[static_cast<size_t>(item)];
    int64_t bin = rooms.first_fit(length);
    if (bin < 0) {
      bin = std::ssize(bins);
      bins.emplace_back();
      rooms.set(bin, std::max(capacity, length));
    }
    bins[static_cast<size_t>(bin)].push_back(item);
    rooms.set(bin, rooms.room(bin) - length);
  }
  return bins;
}

std::vector<Bin> first_fit_decreasing_reference(std::span<const int64_t> lengths,
                                                int64_t capacity) {
  check_arguments(lengths, capacity);
  std::vector<Bin> bins;
  std::vector<int64_t> room;
  for (int64_t item : longest_first(lengths)) {
    const int64_t length = lengths[static_cast<size_t>(item)];
    size_t bin = 0;
    while (bin < bins.size() && room[bin] < length) ++bin;
    if (bin == bins.size()) {
      bins.emplace_back();
      room.push_back(std::max(capacity, length));
    }
    bins[bin].push_back(item);
    room[bin] -= length;
  }
  return bins;
}

std::vector<PackedBatch> pack_documents(std::span<const int64_t> lengths, int64_t capacity,
                                        int64_t multiple) {
  GYRE_CHECK(multiple >= 1, "multiple {}", multiple);
  if (capacity < 1 || capacity % multiple != 0)
    throw_usage(
        "bin capacity {} is not a positive multiple of {} (2·cp); the nearest are {} and {}",
        capacity, multiple, std::max(multiple, capacity / multiple * multiple),
        round_up(std::max<int64_t>(capacity, 1), multiple));
  std::vector<int64_t> slots;
  for (int64_t length : lengths) slots.push_back(round_up(length, multiple));
  std::vector<PackedBatch> batches;
  for (const Bin& bin : first_fit_decreasing(slots, capacity)) {
    PackedBatch batch{{}, {0}, {0}};
    for (int64_t document : bin) {
      const auto i = static_cast<size_t>(document);
      if (batch.slots() + slots[i] > std::numeric_limits<int32_t>::max())
        throw_usage(
            "document {} of {} tokens: the packed stream would exceed the int32 range of "
            "cu_seqlens",
            document, lengths[i]);
      batch.documents.push_back(document);
      batch.cu_seqlens.push_back(batch.cu_seqlens.back() + static_cast<int32_t>(lengths[i]));
      batch.cu_seqlens_padded.push_back(batch.cu_seqlens_padded.back() +
                                        static_cast<int32_t>(slots[i]));
    }
    batches.push_back(std::move(batch));
  }
  return batches;
}

double packing_efficiency(std::span<const PackedBatch> batches, int64_t capacity) {
  double tokens = 0, room = 0;
  for (const PackedBatch& batch : batches) {
    tokens += static_cast<double>(batch.tokens());
    room += static_cast<double>(std::max(capacity, batch.slots()));
  }
  return room > 0 ? tokens / room : 0;
}

int64_t causal_pairs(const PackedBatch& batch) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < batch.bounds().segments(); ++i) {
    const int64_t n = batch.bounds().real_length(i);
    pairs += n * (n + 1) / 2;
  }
  return pairs;
}

std::vector<std::vector<int64_t>> balance_over_groups(std::span<const double> costs, int groups) {
  std::vector<int64_t> order(costs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return costs[static_cast<size_t>(a)] > costs[static_cast<size_t>(b)];
  });
  std::vector<double> load(static_cast<size_t>(groups), 0);
  std::vector<std::vector<int64_t>> dealt(static_cast<size_t>(groups));
  for (int64_t item : order) {
    const auto lightest =
        static_cast<size_t>(std::min_element(load.begin(), load.end()) - load.begin());
    load[lightest] += costs[static_cast<size_t>(item)];
    dealt[lightest].push_back(item);
  }
  for (auto& items : dealt) std::sort(items.begin(), items.end());
  return dealt;
}

}  // namespace gyre
