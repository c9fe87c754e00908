#pragma once
// Packs slots on a device, one thread per slot. Memory bandwidth is the limit: a thread writes 12
// bytes and reads 4 (the next token is in the same cache line). The binary search for the segment
// reads tables that stay in the caches. Embeddings are gathered as in cuda_gather.hpp.

#include <memory>

#include "packing/slot_packer.hpp"

namespace gyre {

/// Packer on `stream`, a CUDA stream. Throws a runtime error in a build without CUDA.
std::unique_ptr<SlotPacker> make_cuda_slot_packer(Stream& stream);

}  // namespace gyre
