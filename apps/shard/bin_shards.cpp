#include "apps/shard/bin_shards.hpp"

#include <type_traits>

#include "core/label.hpp"

namespace gyre {
namespace {

/// Fills results before they are written. No input holds this value.
constexpr std::byte unwritten{0xa5};

}  // namespace

template <class T>
BinShards::Array BinShards::make_array(const std::vector<T>& values, int64_t row, T fill) const {
  Array array{
      Buffer<std::byte>(std::ssize(values) * static_cast<int64_t>(sizeof(T)), stream_.space()),
      row * static_cast<int64_t>(sizeof(T)), RowFill::of(fill)};
  stream_.copy(array.stream.data(), values.data(), array.stream.size());
  stream_.synchronize();
  return array;
}

BinShards::BinShards(const Layout& layout, const PackedSlots& bin, int64_t hidden_size,
                     Stream& stream)
    : stream_(stream),
      layout_(layout),
      shards_(make_stream_shards(layout, stream)),
      labels_(make_array(bin.labels, 1, ignored_label)),
      positions_(make_array(bin.positions, 1, 0)) {
  if (hidden_size > 0)
    embeddings_ = make_array(bin.embeddings, hidden_size, 0.0F);
  else
    ids_ = make_array(bin.ids, 1, 0);
  for (const auto& [name, extra] : bin.extras)
    extras_.emplace(name, make_array(extra.bytes, extra.item_bytes, std::byte{0}));
}

template <class Make>
PackedSlots BinShards::make_slots(int64_t rows, Make make) const {
  PackedSlots slots;
  const auto bring = [&](const Array& array, auto& to) {
    if (array.row_bytes == 0) return;
    using T = typename std::remove_reference_t<decltype(to)>::value_type;
    Buffer<std::byte> out(rows * array.row_bytes, stream_.space());
    const size_t bytes = out.size();
    stream_.fill(out.data(), unwritten, bytes);
    make(array, out);
    to.resize(bytes / sizeof(T));
    stream_.copy(to.data(), out.data(), bytes);
    stream_.synchronize();
  };
  bring(ids_, slots.ids);
  bring(embeddings_, slots.embeddings);
  bring(labels_, slots.labels);
  bring(positions_, slots.positions);
  for (const auto& [name, array] : extras_) {
    ExtraSlots& extra = slots.extras[name];
    extra.item_bytes = array.row_bytes;
    bring(array, extra.bytes);
  }
  return slots;
}

void BinShards::shard_array(const Array& array, int rank, void* local) const {
  shards_->shard(rank, array.stream.data(), layout_.stream_slots, local, array.row_bytes,
                 array.fill);
}

PackedSlots BinShards::shard(int rank) const {
  return make_slots(layout_.slots_of_rank(), [&](const Array& array, Buffer<std::byte>& out) {
    shard_array(array, rank, out.data());
  });
}

PackedSlots BinShards::round_trip() const {
  return make_slots(layout_.stream_slots, [&](const Array& array, Buffer<std::byte>& out) {
    Buffer<std::byte> local(layout_.slots_of_rank() * array.row_bytes, stream_.space());
    for (int r = 0; r < layout_.cp(); ++r) {
      shard_array(array, r, local.data());
      shards_->unshard(r, local.data(), out.data(), layout_.stream_slots, array.row_bytes);
    }
  });
}

PackedSlots BinShards::gathered(Communicator& comm) const {
  return make_slots(layout_.stream_slots, [&](const Array& array, Buffer<std::byte>& out) {
    Buffer<std::byte> local(layout_.slots_of_rank() * array.row_bytes, stream_.space());
    shard_array(array, comm.rank(), local.data());
    shards_->gather(comm, local.data(), out.data(), array.row_bytes);
  });
}

std::vector<int32_t> BinShards::shifted_ids(Communicator& comm, std::span<const int32_t> bounds,
                                            int32_t fill) const {
  const int64_t slots = layout_.slots_of_rank();
  Buffer<int32_t> local(slots, stream_.space()), out(slots, stream_.space());
  shard_array(ids_, comm.rank(), local.data());
  shards_->shift_left(comm, bounds, local.data(), out.data(), fill);
  std::vector<int32_t> shifted(slots);
  stream_.copy(shifted.data(), out.data(), shifted.size() * sizeof(int32_t));
  stream_.synchronize();
  return shifted;
}

}  // namespace gyre
