#pragma once
// Streams and their shards in the memory of a device: the maps of a layout as gathers.
//
//     shard        local[t]  = stream[index[rank][t]]          gather
//     unshard      stream[index[rank][t]] = local[t]           scatter: other slots are left alone
//     unshard_all  stream[s] = shards[owner of s]              gather: every slot is written once
//
// As sharding/transfer.hpp and sharding/distributed.hpp do on the host, and bit for bit the same.
// The limit is memory: each row is moved in and out, and 4 bytes of a map are read (see
// cuda_gather.hpp). The maps take 8 bytes of device memory a slot.

#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "runtime/buffer.hpp"
#include "sharding/cuda_gather.hpp"
#include "sharding/distributed.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// The index lists of all ranks of a layout and their inverse, on the device. All moves are
/// submitted to `stream`, a CUDA stream, which must outlive this. Arrays are in device memory, rows
/// of row_bytes >= 1 bytes; `rows` of a stream is the layout's stream_slots or padded_slots. Throws
/// a usage error when it is neither.
class DeviceLayout {
 public:
  DeviceLayout(const Layout& layout, Stream& stream);

  int cp() const { return cp_; }
  int64_t slots() const { return slots_; }  ///< of a rank
  int64_t stream_slots() const { return stream_slots_; }

  /// local [slots, row] <- the rank's slots of stream [rows, row]; slots past its end become
  /// `fill`.
  void shard(int rank, const void* stream, int64_t rows, void* local, int64_t row_bytes,
             const RowFill& fill = {}) const;
  /// shards [cp, slots, row]: the same for every rank.
  void shard_all(const void* stream, int64_t rows, void* shards, int64_t row_bytes,
                 const RowFill& fill = {}) const;
  /// The rank's slots of stream [rows, row] <- local [slots, row]; others are left alone, and slots
  /// past the end are dropped.
  void unshard(int rank, const void* local, void* stream, int64_t rows, int64_t row_bytes) const;
  /// All of stream [rows, row] <- shards [cp, slots, row].
  void unshard_all(const void* shards, void* stream, int64_t rows, int64_t row_bytes) const;

 private:
  void check_rows(int64_t rows) const;
  const int32_t* index_of(int rank) const;

  std::string name_;
  Stream& stream_;
  int cp_;
  int64_t slots_, stream_slots_, padded_slots_;
  Buffer<int32_t> index_;   ///< [cp, slots] slot of the stream
  Buffer<int32_t> owners_;  ///< [padded_slots] row of the shards of all ranks
};

/// stream [stream_slots, row] on every rank <- local [slots, row] of each, both in device memory:
/// an all-gather over `comm`, a communicator of device memory with as many ranks as the layout, and
/// unshard_all. Complete in `on`'s order on return. Throws a usage error when the group has another
/// size. Collective.
void gather_stream(const DeviceLayout& layout, Communicator& comm, Stream& on, const void* local,
                   void* stream, int64_t row_bytes);

/// A rank's part of a next-token shift (see distributed.hpp), on the device: what is sent is
/// gathered into one buffer, and the result is one gather from [local, received], with the fill
/// value where segments end.
class DeviceShift {
 public:
  /// Of plan_shift_left for this rank.
  DeviceShift(const ShiftPlan& plan, Stream& stream);
  /// out [slots] <- local [slots], values of `bytes` bytes each, in device memory; not in place. As
  /// shift_left_sharded. Complete in the stream's order on return. Collective.
  void shift(Communicator& comm, const void* local, void* out, int64_t bytes,
             const RowFill& fill) const;

 private:
  struct Message {
    int peer;
    int64_t begin, count;
  };
  Stream& stream_;
  int64_t slots_, sent_ = 0, received_ = 0;
  std::vector<Message> sends_, recvs_;
  Buffer<int32_t> outgoing_;  ///< [sent] local slots, message after message
  Buffer<int32_t> result_;    ///< [slots] row of [local, received], or -1: the fill
};

}  // namespace gyre
