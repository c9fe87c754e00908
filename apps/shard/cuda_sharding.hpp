#pragma once
// What gyre-shard moves, on a device. Built with CUDA.

#include <vector>

#include "io/packed_file.hpp"
#include "sharding/cuda_sharding.hpp"

namespace gyre {

/// The slots of one bin on the device, and the layout that cuts them. `padding`: one slot of what a
/// layout appends. Everything that is returned is in host memory.
class DeviceBin {
 public:
  DeviceBin(const Layout& layout, const PackedSlots& bin, int64_t hidden_size,
            const PackedSlots& padding, Stream& stream);

  /// What `rank` holds.
  PackedSlots shard(int rank) const;
  /// The bin, put together from the shards of all ranks, one after the other.
  PackedSlots round_trip() const;
  /// The bin, gathered over `comm` from the shards that its ranks hold.
  PackedSlots gathered(Communicator& comm) const;
  /// The ids of this rank's shard, shifted to the left inside the segments of `bounds`, over
  /// `comm`.
  std::vector<int32_t> shifted_ids(Communicator& comm, std::span<const int32_t> bounds,
                                   int32_t fill) const;

 private:
  /// An array of the bin: rows of bytes.
  struct Array {
    Buffer<std::byte> stream;
    int64_t row_bytes = 0;
    RowFill fill;
  };
  template <class T>
  Array make_array(const std::vector<T>& values, int64_t row, T fill) const;
  /// Runs make(array, out) for each array of a stream or shard of `rows` rows, and brings `out`
  /// back.
  template <class Make>
  PackedSlots make_slots(int64_t rows, Make make) const;

  Stream& stream_;
  const Layout& layout_;
  DeviceLayout device_layout_;
  Array ids_, embeddings_, labels_, positions_;
};

}  // namespace gyre
