#pragma once
// What gyre-pack moves, on a device. Built with CUDA.

#include "apps/common/packed_streams.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// As fill_slots: the documents of bins [first, last) are brought to the device, packed there, and
/// brought back. `stream` is a CUDA stream.
PackedSlots fill_slots_on_device(const PackedHeader& header, int64_t first, int64_t last,
                                 const TokenSource& tokens, Stream& stream);

/// result [sources.size(), row] <- rows [any number, row] by `sources`; -1: zeros. All in host
/// memory, gathered on the device.
std::vector<float> gather_rows_on_device(std::span<const float> rows,
                                         std::span<const int32_t> sources, int64_t row,
                                         Stream& stream);

}  // namespace gyre
