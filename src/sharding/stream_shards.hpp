#pragma once
// Streams and their shards in the memory of a stream of work, of the host or of a device.
//
//     shard        local[t] = stream[index[rank][t]]       for one rank; padding of the layout:
//     fill unshard      stream[index[rank][t]] = local[t]       other slots are left alone gather
//     stream <- the shards of all ranks, over a communicator shift_left   every slot gets the value
//     of the next slot of its segment, over a communicator
//
// On the host these are the functions of transfer.hpp and distributed.hpp; on a device they are
// gathers by the layout's index lists (cuda_sharding.hpp), bit for bit the same.

#include <cstdint>
#include <memory>
#include <span>

#include "comm/communicator.hpp"
#include "runtime/stream.hpp"
#include "sharding/layout.hpp"
#include "sharding/row_fill.hpp"

namespace gyre {

/// The moves of one layout. Arrays lie in the memory of the stream of work that this was made for,
/// and are read and written in its order. Rows have row_bytes >= 1 bytes; a stream has `rows` rows:
/// the layout's stream_slots or padded_slots, else there is a usage error.
class StreamShards {
 public:
  virtual ~StreamShards() = default;
  /// local [slots, row] <- the rank's slots of stream [rows, row]; slots past its end become
  /// `fill`.
  virtual void shard(int rank, const void* stream, int64_t rows, void* local, int64_t row_bytes,
                     const RowFill& fill) = 0;
  /// The rank's slots of stream [rows, row] <- local [slots, row]; others are left alone, and slots
  /// past the end are dropped.
  virtual void unshard(int rank, const void* local, void* stream, int64_t rows,
                       int64_t row_bytes) = 0;
  /// stream [stream_slots, row] on every rank <- local [slots, row] of each, over `comm`, whose
  /// memory is that of the arrays. Throws a usage error when the group is not of as many ranks as
  /// the layout. Collective.
  virtual void gather(Communicator& comm, const void* local, void* stream, int64_t row_bytes) = 0;
  /// out [slots] <- local [slots], shifted left by one slot inside each segment of `bounds` over
  /// all ranks of `comm`; `fill` where segments end. Not in place. As shift_left_sharded.
  /// Collective.
  virtual void shift_left(Communicator& comm, std::span<const int32_t> bounds, const int32_t* local,
                          int32_t* out, int32_t fill) = 0;
};

/// Those of the stream's space. Layout and stream must outlive them. Throws a runtime error for a
/// device in a build without CUDA.
std::unique_ptr<StreamShards> make_stream_shards(const Layout& layout, Stream& stream);

}  // namespace gyre
