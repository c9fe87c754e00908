#pragma once
// Streams and their shards in the memory of a device: the maps of a layout as gathers.
//
//     shard        local[t]  = stream[index[rank][t]]          gather
//     unshard      stream[index[rank][t]] = local[t]           scatter: other slots are left alone
//     gather       stream[s] = shards[owner of s]              all-gather, then a gather: every
//     slot
//                                                              is written once
//     shift_left   what is sent is gathered into one buffer; the result is one gather from
//                  [local, received], with the fill value where segments end
//
// The limit is memory: each row is moved in and out, and 4 bytes of a map are read (see
// cuda_gather.hpp). The maps take 8 bytes of device memory a slot.

#include <memory>

#include "runtime/stream.hpp"
#include "sharding/stream_shards.hpp"

namespace gyre {

/// On `stream`, a CUDA stream. The index lists of all ranks and their inverse are copied to the
/// device here. Throws a runtime error in a build without CUDA.
std::unique_ptr<StreamShards> make_cuda_stream_shards(const Layout& layout, Stream& stream);

}  // namespace gyre
