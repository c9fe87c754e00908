// Stub of the CUDA slot packer for builds without CUDA.

#include "core/error.hpp"
#include "packing/cuda_packing.hpp"

namespace gyre {

std::unique_ptr<SlotPacker> make_cuda_slot_packer(Stream& /*stream*/) {
  throw_runtime("packing on a GPU: this build has no CUDA");
}

}  // namespace gyre
