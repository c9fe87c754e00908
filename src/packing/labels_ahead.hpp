#pragma once
// Labels of multi-token prediction: depth k of a slot is the k-th token after it, k = 1 the usual
// label.
//
//     cu_seqlens 0 3 5, cu_seqlens_padded 0 4 8
//
//     slots      a  b  c  .  d  e  .  .
//     labels     b  c  -  -  e  -  -  -      depth 1
//     labels_2   c  -  -  -  -  -  -  -      a label outside its document is -100, as in padding
//
//     serial:  labels_k[t] = labels[t + k - 1] if t and t + k - 1 are tokens of the same segment,
//              else -100
//
// Each depth is the one before, shifted left by one slot in every segment (shift_left), which also
// works across shards (shift_left_sharded). Megatron-LM rolls labels of each depth likewise.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/label.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// Largest depth that programs make or recognise.
inline constexpr int most_labels_ahead = 16;

/// Name of the extra that holds the labels of a depth from 2 on: "labels_2".
std::string labels_ahead_name(int depth);
/// Depth of the labels that an extra of this name holds; 0: it holds no labels.
int depth_of_labels(const std::string& name);

/// Labels of depths 2 to `depth`, from those of depth 1, [slots] of a stream. Throws a usage error
/// that names `stream` and its first slot of padding with a label.
std::vector<std::vector<int32_t>> labels_ahead(SegmentBounds bounds,
                                               std::span<const int32_t> labels, int depth,
                                               std::string_view stream);
/// Labels of one depth by their definition.
std::vector<int32_t> labels_ahead_reference(SegmentBounds bounds, std::span<const int32_t> labels,
                                            int depth);

}  // namespace gyre
