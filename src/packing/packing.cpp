#include "packing/packing.hpp"

#include <algorithm>
#include <numeric>

#include "core/error.hpp"
#include "core/index.hpp"

namespace gyre {
namespace {

[[noreturn]] void throw_beyond_int32(int64_t document, int64_t length) {
  throw_usage(
      "document {} of {} tokens: the packed stream would exceed the int32 range of cu_seqlens",
      document, length);
}

std::vector<int64_t> slots_of(std::span<const int64_t> lengths, int64_t multiple) {
  std::vector<int64_t> slots;
  slots.reserve(lengths.size());
  for (int64_t length : lengths) {
    if (length < 0) throw_usage("length {} of document {} is negative", length, slots.size());
    // Checked before rounding, which could overflow.
    if (length > max_slots) throw_beyond_int32(std::ssize(slots), length);
    slots.push_back(round_up(length, multiple));
  }
  return slots;
}

PackedBatch batch_of(const Bin& bin, std::span<const int64_t> lengths,
                     std::span<const int64_t> slots) {
  PackedBatch batch{{}, {0}, {0}};
  for (int64_t document : bin) {
    const size_t i = document;
    if (batch.slots() + slots[i] > max_slots) throw_beyond_int32(document, lengths[i]);
    batch.documents.push_back(document);
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + static_cast<int32_t>(lengths[i]));
    batch.cu_seqlens_padded.push_back(batch.cu_seqlens_padded.back() +
                                      static_cast<int32_t>(slots[i]));
  }
  return batch;
}

}  // namespace

std::vector<PackedBatch> pack_documents(std::span<const int64_t> lengths, int64_t multiple,
                                        const BinPacker& packer, const BinOptions& options) {
  GYRE_CHECK(multiple >= 1, "multiple {}", multiple);
  const int64_t capacity = options.capacity;
  if (capacity < 1 || capacity % multiple != 0)
    throw_usage(
        "bin capacity {} is not a positive multiple of {} (2·cp); the nearest are {} and {}",
        capacity, multiple, std::max(multiple, capacity / multiple * multiple),
        round_up(std::max<int64_t>(capacity, 1), multiple));
  const std::vector<int64_t> slots = slots_of(lengths, multiple);
  std::vector<PackedBatch> batches;
  for (const Bin& bin : packer.pack(slots, options))
    batches.push_back(batch_of(bin, lengths, slots));
  return batches;
}

std::vector<PackedBatch> pack_documents(std::span<const int64_t> lengths, int64_t capacity,
                                        int64_t multiple) {
  BinOptions options;
  options.capacity = capacity;
  options.oversize = Oversize::own_bin;
  return pack_documents(lengths, multiple, find_bin_packer("first-fit-decreasing"), options);
}

double packing_efficiency(std::span<const PackedBatch> batches, int64_t capacity) {
  double tokens = 0, room = 0;
  for (const PackedBatch& batch : batches) {
    tokens += batch.tokens();
    room += std::max(capacity, batch.slots());
  }
  return room > 0 ? tokens / room : 0;
}

std::vector<std::vector<int64_t>> balance_over_groups(std::span<const double> costs, int groups) {
  std::vector<int64_t> order(costs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return costs[a] > costs[b]; });
  std::vector<double> load(groups, 0);
  std::vector<std::vector<int64_t>> dealt(groups);
  for (int64_t item : order) {
    const auto lightest = std::min_element(load.begin(), load.end()) - load.begin();
    load[lightest] += costs[item];
    dealt[lightest].push_back(item);
  }
  for (auto& items : dealt) std::sort(items.begin(), items.end());
  return dealt;
}

}  // namespace gyre
