#include "packing/labels_ahead.hpp"

#include <fmt/format.h>

#include "core/error.hpp"
#include "sharding/distributed.hpp"

namespace gyre {

std::string labels_ahead_name(int depth) {
  return fmt::format("labels_{}", depth);
}

int depth_of_labels(const std::string& name) {
  for (int depth = 2; depth <= most_labels_ahead; ++depth)
    if (name == labels_ahead_name(depth)) return depth;
  return 0;
}

std::vector<std::vector<int32_t>> labels_ahead(SegmentBounds bounds,
                                               std::span<const int32_t> labels, int depth,
                                               std::string_view stream) {
  for (int64_t i = 0; i < bounds.segments(); ++i)
    for (int64_t t = bounds.padded[i] + bounds.real_length(i); t < bounds.padded[i + 1]; ++t)
      if (labels[t] != ignored_label)
        throw_usage("{}: slot {} is padding of segment {}, and has the label {}; it must be {}",
                    stream, t, i, labels[t], ignored_label);
  std::vector<std::vector<int32_t>> all;
  for (int k = 2; k <= depth; ++k)
    all.push_back(shift_left<int32_t>(
        bounds.padded, all.empty() ? labels : std::span<const int32_t>(all.back()), ignored_label));
  return all;
}

std::vector<int32_t> labels_ahead_reference(SegmentBounds bounds, std::span<const int32_t> labels,
                                            int depth) {
  std::vector<int32_t> out(labels.size(), ignored_label);
  for (int64_t i = 0; i < bounds.segments(); ++i)
    for (int64_t p = 0; p + depth - 1 < bounds.real_length(i); ++p)
      out[bounds.padded[i] + p] = labels[bounds.padded[i] + p + depth - 1];
  return out;
}

}  // namespace gyre
