#pragma once
// Sharding of streams in device memory: the index maps of a layout as gathers.
//
//     shard        local[t]  = stream[index[rank][t]]          gather
//     unshard      stream[index[rank][t]] = local[t]           scatter: other slots are kept
//     gather       stream[s] = shards[owner of s]              all-gather, then a gather that
//                                                              writes every slot once
//     shift_left   the slots to send are gathered into one buffer; the result is one gather from
//                  [local, received], with the fill value where segments end
//
// Memory bandwidth is the limit: each row is read and written once, and 4 bytes of a map are read
// (see runtime/row_copy.hpp). The maps take 8 bytes of device memory per slot.

#include <memory>

#include "runtime/stream.hpp"
#include "sharding/stream_shards.hpp"

namespace gyre {

/// Shards on `stream`, a CUDA stream. Copies the index lists of all ranks and their inverse to the
/// device. Throws a runtime error in a build without CUDA.
std::unique_ptr<StreamShards> make_cuda_stream_shards(const Layout& layout, Stream& stream);

}  // namespace gyre
