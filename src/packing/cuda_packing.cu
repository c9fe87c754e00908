#include "core/error.hpp"
#include "core/index.hpp"
#include "core/label.hpp"
#include "packing/cuda_packing.hpp"
#include "packing/slot_source.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"

namespace gyre {
namespace {

constexpr int threads = 256;

__global__ void __launch_bounds__(threads)
    pack_slots(const SegmentTable table, const int32_t* tokens, int64_t slots, int32_t* ids,
               int32_t* labels, int32_t* positions) {
  const int64_t slot = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (slot >= slots) return;
  const SlotSource source = slot_source(table, slot);
  ids[slot] = source.token < 0 ? 0 : tokens[source.token];
  labels[slot] = source.next < 0 ? ignored_label : tokens[source.next];
  positions[slot] = source.position;
}

void check(const SegmentLists& segments, int64_t tokens) {
  for (size_t i = 0; i < segments.real_length.size(); ++i) {
    const int64_t length = segments.real_length[i], first = segments.first_token[i];
    const int64_t room = segments.first_slot[i + 1] - segments.first_slot[i];
    if (length < 0 || length > room)
      throw_usage("segment {}: {} real tokens in {} slots; there are 0 to {}", i, length, room,
                  room);
    if (first < 0 || first + length > tokens)
      throw_usage("segment {}: tokens {} to {} of {}", i, first, first + length, tokens);
  }
}

template <class T>
Buffer<T> upload(std::span<const T> values, Stream& stream) {
  Buffer<T> there(std::ssize(values), MemorySpace::device);
  stream.copy(there.data(), values.data(), values.size_bytes());
  return there;
}

}  // namespace

DeviceSlots pack_slots_on_device(const SegmentLists& segments, std::span<const int32_t> tokens,
                                 Stream& stream) {
  check(segments, std::ssize(tokens));
  const int64_t slots = segments.slots();
  DeviceSlots out{Buffer<int32_t>(slots, MemorySpace::device),
                  Buffer<int32_t>(slots, MemorySpace::device),
                  Buffer<int32_t>(slots, MemorySpace::device)};
  const auto first_slot = upload<int64_t>(segments.first_slot, stream);
  const auto real_length = upload<int32_t>(segments.real_length, stream);
  const auto first_token = upload<int64_t>(segments.first_token, stream);
  const auto source = upload<int32_t>(tokens, stream);
  const SegmentTable table{std::ssize(segments.real_length), first_slot.data(), real_length.data(),
                           first_token.data()};
  const auto blocks = static_cast<unsigned>(ceil_div(slots, threads));
  launch({blocks, threads, cuda_handle(stream)}, pack_slots, table, source.data(), slots,
         out.ids.data(), out.labels.data(), out.positions.data());
  stream.synchronize();
  return out;
}

}  // namespace gyre
