// Stub of sharding on a device for builds without CUDA.

#include "core/error.hpp"
#include "sharding/cuda_sharding.hpp"

namespace gyre {

std::unique_ptr<StreamShards> make_cuda_stream_shards(const Layout& /*layout*/,
                                                      Stream& /*stream*/) {
  throw_runtime("sharding on a GPU: this build has no CUDA");
}

}  // namespace gyre
