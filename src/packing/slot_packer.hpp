#pragma once
// Packs documents into slots: fills ids, next-token labels and positions of every slot from the
// documents' tokens, and gathers rows of embeddings by an index list. Arguments and results are in
// host memory; the results are computed where the stream's memory is.
//
// 2 segments of 3 and 1 real tokens in 4 and 2 slots; first tokens 10 and 0, first positions 0 and
// 7:
//
//     slot        0   1   2   3   4   5
//     id         10  11  12   0   0   0      0: padding
//     label      11  12   -   -   -   -      -: none, which is ignored_label
//     position    0   1   2   3   7   8      not from 0 where a document continues a shared prefix

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/stream.hpp"

namespace gyre {

/// Consecutive slots of one document: `length` real tokens from index `token` on, then padding.
struct Segment {
  int64_t slot = 0, slots = 0;
  int64_t token = 0;
  int32_t length = 0, position = 0;
};

/// Segments of consecutive slots, from slot 0 on.
struct SegmentList {
  std::vector<Segment> segments;
  void add(int64_t slots, int32_t length, int64_t token, int32_t position = 0) {
    segments.push_back({this->slots(), slots, token, length, position});
  }
  int64_t slots() const {
    return segments.empty() ? 0 : segments.back().slot + segments.back().slots;
  }
};

/// Contents of the slots, [slots] each.
struct SlotArrays {
  std::vector<int32_t> ids, labels, positions;
};

/// Packs the segments from `tokens` [count]. Throws a usage error that names the segment unless 0
/// <= real length <= slots and its tokens lie within `tokens`, and a runtime error for a device in
/// a build without CUDA.
SlotArrays pack_slots(const SegmentList& list, std::span<const int32_t> tokens, Stream& stream);

/// Gathers rows [any number, width] by `sources` into [sources.size(), width]; -1 gives zeros.
std::vector<float> gather_embeddings(std::span<const float> rows, std::span<const int32_t> sources,
                                     int64_t width, Stream& stream);

}  // namespace gyre
