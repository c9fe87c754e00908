#pragma once
// Packs documents into bins, and bins into THD batches.
//
// A bin becomes one packed stream: its documents one after the other, each in a slot range whose
// length is rounded up to a multiple (2·cp under DualChunkSwap). cu_seqlens holds prefix sums of
// real lengths, cu_seqlens_padded those of the slot ranges.

#include <cstdint>
#include <span>
#include <vector>

#include "packing/bins.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// One bin as a packed stream.
struct PackedBatch {
  std::vector<int64_t> documents;          ///< [N] input index of each segment
  std::vector<int32_t> cu_seqlens;         ///< [N + 1] real
  std::vector<int32_t> cu_seqlens_padded;  ///< [N + 1] slots
  SegmentBounds bounds() const { return {cu_seqlens, cu_seqlens_padded}; }
  int64_t tokens() const { return cu_seqlens.back(); }
  int64_t slots() const { return cu_seqlens_padded.back(); }
};

/// Packs documents of the given lengths [n] into bins of options.capacity slots by any packer of
/// bins.hpp. Each document takes round_up(length, multiple) slots; the packer sees these rounded
/// lengths. Returns one batch per bin, in the packer's order. Throws a usage error when the
/// capacity is not a positive multiple of `multiple` (with the nearest valid values), when a length
/// is negative, when a stream would exceed int32, and for errors of the packer (whose "items" are
/// documents with rounded lengths).
std::vector<PackedBatch> pack_documents(std::span<const int64_t> lengths, int64_t multiple,
                                        const BinPacker& packer, const BinOptions& options);

/// Packs by first_fit_decreasing; a document longer than `capacity` gets a bin of its own.
std::vector<PackedBatch> pack_documents(std::span<const int64_t> lengths, int64_t capacity,
                                        int64_t multiple);

/// Real tokens over the capacity of all bins. A bin with an oversize document counts its slots as
/// its capacity.
double packing_efficiency(std::span<const PackedBatch> batches, int64_t capacity);

/// Deals items over `groups` by cost, heaviest first, each to the group with the least cost so far
/// (ties: lower group, lower item). Returns each group's items in ascending order.
std::vector<std::vector<int64_t>> balance_over_groups(std::span<const double> costs, int groups);

}  // namespace gyre
