#pragma once
// The slots of one bin, cut by a layout where a stream of work computes: on the host or a device.

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/packed_file.hpp"
#include "runtime/buffer.hpp"
#include "sharding/stream_shards.hpp"

namespace gyre {

/// The arrays of a bin in the memory of `stream`. What is returned is in host memory. Layout and
/// stream must outlive this.
class BinShards {
 public:
  /// `hidden_size` > 0: embeddings of that width take the place of ids.
  BinShards(const Layout& layout, const PackedSlots& bin, int64_t hidden_size, Stream& stream);

  /// The slots of `rank`.
  PackedSlots shard(int rank) const;
  /// The bin, put together from the shards of all ranks, one after the other.
  PackedSlots round_trip() const;
  /// The bin, gathered over `comm` from the shards that its ranks hold. Collective.
  PackedSlots gathered(Communicator& comm) const;
  /// The ids of this rank's shard, shifted to the left inside the segments of `bounds` over `comm`;
  /// `fill` where segments end. Collective.
  std::vector<int32_t> shifted_ids(Communicator& comm, std::span<const int32_t> bounds,
                                   int32_t fill) const;

 private:
  /// An array of the bin: rows of bytes.
  struct Array {
    Buffer<std::byte> stream;
    int64_t row_bytes = 0;  ///< 0: the bin has no such array
    RowFill fill;           ///< of slots that the layout appends
  };
  template <class T>
  Array make_array(const std::vector<T>& values, int64_t row, T fill) const;
  /// Runs make(array, out) for each array of a stream or shard of `rows` rows, and copies each
  /// `out` to the host.
  template <class Make>
  PackedSlots make_slots(int64_t rows, Make make) const;
  void shard_array(const Array& array, int rank, void* local) const;

  Stream& stream_;
  const Layout& layout_;
  std::unique_ptr<StreamShards> shards_;
  Array ids_, embeddings_, labels_, positions_;
  std::map<std::string, Array> extras_;
};

}  // namespace gyre
