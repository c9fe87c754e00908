#pragma once
// Packs documents into slots: fills ids, next-token labels and positions of every slot from the
// documents' tokens, and gathers rows of embeddings by an index list.
//
//     for each slot   (token, next, position) = slot_source(segments, slot)     slot_source.hpp
//                     ids[slot]       = token < 0 ? 0 : tokens[token]
//                     labels[slot]    = next < 0 ? ignored_label : tokens[next]
//                     positions[slot] = position

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/stream.hpp"

namespace gyre {

/// Segments of consecutive slots, from slot 0 on; see slot_source.hpp.
struct SegmentLists {
  std::vector<int64_t> first_slot{0};   ///< [segments + 1]
  std::vector<int32_t> real_length;     ///< [segments]
  std::vector<int64_t> first_token;     ///< [segments]
  std::vector<int32_t> first_position;  ///< [segments]
  void add(int64_t slots, int32_t length, int64_t token, int32_t position = 0) {
    first_slot.push_back(first_slot.back() + slots);
    real_length.push_back(length);
    first_token.push_back(token);
    first_position.push_back(position);
  }
  int64_t slots() const { return first_slot.back(); }
};

/// Contents of the slots, [slots] each.
struct SlotArrays {
  std::vector<int32_t> ids, labels, positions;
};

/// Arguments and results are in host memory; the packer decides where results are computed.
class SlotPacker {
 public:
  virtual ~SlotPacker() = default;
  /// Packs the segments from `tokens` [count]. Throws a usage error that names the segment unless 0
  /// <= real length <= slots and its tokens lie within `tokens`.
  SlotArrays pack(const SegmentLists& segments, std::span<const int32_t> tokens);
  /// Gathers rows [any number, row] by `sources` into [sources.size(), row]; -1 gives zeros.
  virtual std::vector<float> gather(std::span<const float> rows, std::span<const int32_t> sources,
                                    int64_t row) = 0;

 private:
  virtual SlotArrays do_pack(const SegmentLists& segments, std::span<const int32_t> tokens) = 0;
};

/// The packer for the stream's memory space. The stream must outlive it. Throws a runtime error for
/// a device in a build without CUDA.
std::unique_ptr<SlotPacker> make_slot_packer(Stream& stream);

}  // namespace gyre
