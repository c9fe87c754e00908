#pragma once
// Token streams and their shards in the memory of an execution stream, on the host or a device.
//
//     shard        local[t] = stream[index[rank][t]] for one rank; padding of the layout: fill
//     unshard      stream[index[rank][t]] = local[t]; other slots keep their value
//     gather       stream <- the shards of all ranks, over a communicator
//     shift_left   every slot gets the next slot of its segment, over a communicator
//
// The host uses the functions of transfer.hpp and distributed.hpp; a device uses gathers by the
// layout's index lists (cuda_sharding.hpp), with bit-identical results.

#include <cstdint>
#include <memory>
#include <span>

#include "comm/communicator.hpp"
#include "runtime/row_fill.hpp"
#include "runtime/stream.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// Data movement of one layout. Arrays lie in the memory of the execution stream and are accessed
/// in its order. Rows have row_bytes >= 1 bytes. A token stream has `rows` rows: stream_slots or
/// padded_slots of the layout, else a usage error is thrown.
class StreamShards {
 public:
  virtual ~StreamShards() = default;
  /// Copies the rank's slots of stream [rows, row] into local [slots, row]; slots past its end
  /// become `fill`.
  virtual void shard(int rank, const void* stream, int64_t rows, void* local, int64_t row_bytes,
                     const RowFill& fill) = 0;
  /// Copies local [slots, row] into the rank's slots of stream [rows, row]. Other slots keep their
  /// value; slots past the end are dropped.
  virtual void unshard(int rank, const void* local, void* stream, int64_t rows,
                       int64_t row_bytes) = 0;
  /// All-gathers local [slots, row] into stream [stream_slots, row] on every rank of `comm`, whose
  /// memory space is that of the arrays. Throws a usage error when the group has another number of
  /// ranks than the layout. Collective.
  virtual void gather(Communicator& comm, const void* local, void* stream, int64_t row_bytes) = 0;
  /// Shifts local [slots] left by one slot inside each segment of `bounds` across all ranks of
  /// `comm`, into out [slots]; `fill` where segments end. Not in place. See shift_left_sharded.
  /// Collective.
  virtual void shift_left(Communicator& comm, std::span<const int32_t> bounds, const int32_t* local,
                          int32_t* out, int32_t fill) = 0;
};

/// Makes the implementation for the stream's memory space. Layout and stream must outlive it.
/// Throws a runtime error for a device in a build without CUDA.
std::unique_ptr<StreamShards> make_stream_shards(const Layout& layout, Stream& stream);

}  // namespace gyre
