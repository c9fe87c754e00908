#pragma once
// Slots packed on a device: one thread a slot. The limit is memory: 12 bytes are written and 4 read
// for each slot (the next token is in the same line). The search for the segment reads tables that
// stay in the caches. Embeddings are gathered as cuda_gather.hpp says.

#include <memory>

#include "packing/slot_packer.hpp"

namespace gyre {

/// On `stream`, a CUDA stream. Throws a runtime error in a build without CUDA.
std::unique_ptr<SlotPacker> make_cuda_slot_packer(Stream& stream);

}  // namespace gyre
