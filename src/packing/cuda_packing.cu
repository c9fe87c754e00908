#include "core/index.hpp"
#include "core/label.hpp"
#include "packing/cuda_packing.hpp"
#include "packing/slot_source.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"
#include "sharding/cuda_gather.hpp"

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

class CudaSlotPacker final : public SlotPacker {
 public:
  explicit CudaSlotPacker(Stream& stream) : stream_(stream) {}

  std::vector<float> gather(std::span<const float> rows, std::span<const int32_t> sources,
                            int64_t row) override {
    const auto from = upload(rows);
    const auto map = upload(sources);
    Buffer<float> to(std::ssize(sources) * row, MemorySpace::device);
    gather_rows(stream_, to.data(), from.data(), map.data(), map.size(), from.size() / row,
                row * sizeof(float), RowFill::of(0.0F));
    return download(to);
  }

 private:
  SlotArrays do_pack(const SegmentLists& segments, std::span<const int32_t> tokens) override {
    const int64_t slots = segments.slots();
    Buffer<int32_t> ids(slots, MemorySpace::device), labels(slots, MemorySpace::device),
        positions(slots, MemorySpace::device);
    const auto first_slot = upload(std::span<const int64_t>(segments.first_slot));
    const auto real_length = upload(std::span<const int32_t>(segments.real_length));
    const auto first_token = upload(std::span<const int64_t>(segments.first_token));
    const auto first_position = upload(std::span<const int32_t>(segments.first_position));
    const auto source = upload(tokens);
    const SegmentTable table{std::ssize(segments.real_length), first_slot.data(),
                             real_length.data(), first_token.data(), first_position.data()};
    const auto blocks = static_cast<unsigned>(ceil_div(slots, threads));
    launch({blocks, threads, cuda_handle(stream_)}, pack_slots, table, source.data(), slots,
           ids.data(), labels.data(), positions.data());
    return {download(ids), download(labels), download(positions)};
  }

  template <class T>
  Buffer<T> upload(std::span<const T> values) {
    Buffer<T> there(std::ssize(values), MemorySpace::device);
    stream_.copy(there.data(), values.data(), values.size_bytes());
    return there;
  }
  template <class T>
  std::vector<T> download(const Buffer<T>& from) {
    std::vector<T> values(from.size());
    stream_.copy(values.data(), from.data(), values.size() * sizeof(T));
    stream_.synchronize();
    return values;
  }

  Stream& stream_;
};

}  // namespace

std::unique_ptr<SlotPacker> make_cuda_slot_packer(Stream& stream) {
  return std::make_unique<CudaSlotPacker>(stream);
}

}  // namespace gyre
