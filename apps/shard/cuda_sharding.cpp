#include "apps/shard/cuda_sharding.hpp"

namespace gyre {
namespace {

/// What no slot holds: a row that is not written shows.
constexpr std::byte unwritten{0xa5};

}  // namespace

template <class T>
DeviceBin::Array DeviceBin::make_array(const std::vector<T>& values, int64_t row, T fill) const {
  if (values.empty()) return {};
  Array array{
      Buffer<std::byte>(std::ssize(values) * static_cast<int64_t>(sizeof(T)), MemorySpace::device),
      row * static_cast<int64_t>(sizeof(T)), RowFill::of(fill)};
  stream_.copy(array.stream.data(), values.data(), static_cast<size_t>(array.stream.size()));
  stream_.synchronize();
  return array;
}

DeviceBin::DeviceBin(const Layout& layout, const PackedSlots& bin, int64_t hidden_size,
                     const PackedSlots& padding, Stream& stream)
    : stream_(stream),
      layout_(layout),
      device_layout_(layout, stream),
      ids_(make_array(bin.ids, 1, padding.ids[0])),
      embeddings_(make_array(bin.embeddings, hidden_size, 0.0F)),
      labels_(make_array(bin.labels, 1, padding.labels[0])),
      positions_(make_array(bin.positions, 1, padding.positions[0])) {}

template <class Make>
PackedSlots DeviceBin::make_slots(int64_t rows, Make make) const {
  PackedSlots slots;
  const auto bring = [&](const Array& array, auto& to) {
    if (array.row_bytes == 0) return;
    using T = typename std::remove_reference_t<decltype(to)>::value_type;
    Buffer<std::byte> out(rows * array.row_bytes, MemorySpace::device);
    const auto bytes = static_cast<size_t>(out.size());
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
  return slots;
}

PackedSlots DeviceBin::shard(int rank) const {
  return make_slots(layout_.slots_of_rank(), [&](const Array& array, Buffer<std::byte>& out) {
    device_layout_.shard(rank, array.stream.data(), layout_.stream_slots, out.data(),
                         array.row_bytes, array.fill);
  });
}

PackedSlots DeviceBin::round_trip() const {
  return make_slots(layout_.stream_slots, [&](const Array& array, Buffer<std::byte>& out) {
    Buffer<std::byte> local(layout_.slots_of_rank() * array.row_bytes, MemorySpace::device);
    for (int r = 0; r < layout_.cp(); ++r) {
      device_layout_.shard(r, array.stream.data(), layout_.stream_slots, local.data(),
                           array.row_bytes, array.fill);
      device_layout_.unshard(r, local.data(), out.data(), layout_.stream_slots, array.row_bytes);
    }
  });
}

PackedSlots DeviceBin::gathered(Communicator& comm) const {
  return make_slots(layout_.stream_slots, [&](const Array& array, Buffer<std::byte>& out) {
    Buffer<std::byte> local(layout_.slots_of_rank() * array.row_bytes, MemorySpace::device);
    device_layout_.shard(comm.rank(), array.stream.data(), layout_.stream_slots, local.data(),
                         array.row_bytes, array.fill);
    gather_stream(device_layout_, comm, stream_, local.data(), out.data(), array.row_bytes);
  });
}

std::vector<int32_t> DeviceBin::shifted_ids(Communicator& comm, std::span<const int32_t> bounds,
                                            int32_t fill) const {
  const DeviceShift shift(plan_shift_left(layout_, bounds, comm.rank()), stream_);
  const int64_t slots = layout_.slots_of_rank();
  Buffer<int32_t> local(slots, MemorySpace::device), out(slots, MemorySpace::device);
  device_layout_.shard(comm.rank(), ids_.stream.data(), layout_.stream_slots, local.data(),
                       sizeof(int32_t), ids_.fill);
  shift.shift(comm, local.data(), out.data(), sizeof(int32_t), RowFill::of(fill));
  std::vector<int32_t> shifted(static_cast<size_t>(slots));
  stream_.copy(shifted.data(), out.data(), shifted.size() * sizeof(int32_t));
  stream_.synchronize();
  return shifted;
}

}  // namespace gyre
