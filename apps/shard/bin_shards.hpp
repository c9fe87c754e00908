#pragma once
// Cuts the slots of one bin by a layout, on the stream's device or on the host.

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/packed_file.hpp"
#include "runtime/buffer.hpp"
#include "sharding/stream_shards.hpp"

namespace gyre {

/// The arrays of a bin in the memory of `stream`. Results are in host memory. Layout and stream
/// must outlive this object.
class BinShards {
 public:
  /// With `hidden_size` > 0, embeddings of that width replace the ids.
  BinShards(const Layout& layout, const PackedSlots& bin, int64_t hidden_size, Stream& stream);

  /// The slots of `rank`.
  PackedSlots shard(int rank) const;
  /// The bin, restored from the shards of all ranks in turn.
  PackedSlots round_trip() const;
  /// The bin, gathered over `comm` from the shards that its ranks hold. Collective.
  PackedSlots gathered(Communicator& comm) const;
  /// The ids of this rank's shard, shifted to the left inside the segments of `bounds` over `comm`;
  /// with `fill` at the ends of segments. Collective.
  std::vector<int32_t> shifted_ids(Communicator& comm, std::span<const int32_t> bounds,
                                   int32_t fill) const;

 private:
  /// An array of the bin: rows of bytes.
  struct Array {
    Buffer<std::byte> stream;
    int64_t row_bytes = 0;  ///< 0: the bin has no such array
    RowFill fill;           ///< value of the slots that the layout appends
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
