#include "packing/slot_packer.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/label.hpp"
#include "packing/cuda_packing.hpp"

namespace gyre {
namespace {

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

class HostSlotPacker final : public SlotPacker {
 public:
  std::vector<float> gather(std::span<const float> rows, std::span<const int32_t> sources,
                            int64_t row) override {
    std::vector<float> gathered(sources.size() * row, 0.0F);
    for (size_t i = 0; i < sources.size(); ++i)
      if (sources[i] >= 0)
        std::ranges::copy(rows.subspan(sources[i] * row, row),
                          gathered.begin() + static_cast<std::ptrdiff_t>(i) * row);
    return gathered;
  }

 private:
  /// Walks segment by segment, so that no search is needed.
  SlotArrays do_pack(const SegmentLists& segments, std::span<const int32_t> tokens) override {
    SlotArrays slots;
    for (auto* array : {&slots.ids, &slots.labels, &slots.positions})
      array->reserve(segments.slots());
    for (size_t i = 0; i < segments.real_length.size(); ++i) {
      const auto room = static_cast<int32_t>(segments.first_slot[i + 1] - segments.first_slot[i]);
      const int32_t length = segments.real_length[i];
      const int32_t* token = tokens.data() + segments.first_token[i];
      const int32_t position = segments.first_position[i];
      for (int32_t p = 0; p < room; ++p) {
        slots.ids.push_back(p < length ? token[p] : 0);
        slots.labels.push_back(p + 1 < length ? token[p + 1] : ignored_label);
        slots.positions.push_back(position + p);
      }
    }
    return slots;
  }
};

}  // namespace

SlotArrays SlotPacker::pack(const SegmentLists& segments, std::span<const int32_t> tokens) {
  check(segments, std::ssize(tokens));
  return do_pack(segments, tokens);
}

std::unique_ptr<SlotPacker> make_slot_packer(Stream& stream) {
  if (stream.space() == MemorySpace::device) return make_cuda_slot_packer(stream);
  return std::make_unique<HostSlotPacker>();
}

}  // namespace gyre
