#include <algorithm>

#include "core/label.hpp"
#include "packing/slot_packer.hpp"
#include "runtime/buffer.hpp"
#include "runtime/for_rows.cuh"

namespace gyre {
namespace {

/// Fills the slots of a segment. Memory bandwidth is the limit: 12 bytes are written for a slot and
/// 4 are read (the next token is in the same cache line).
struct FillSegment {
  const Segment* segments;
  const int32_t* tokens;
  int32_t *ids, *labels, *positions;
  template <class Lanes>
  GYRE_HOST_DEVICE void operator()(int64_t index, const Lanes& lanes) const {
    const Segment segment = segments[index];
    const int32_t* token = tokens + segment.token;
    for (int64_t p = lanes.first; p < segment.slots; p += lanes.count) {
      ids[segment.slot + p] = p < segment.length ? token[p] : 0;
      labels[segment.slot + p] = p + 1 < segment.length ? token[p + 1] : ignored_label;
      positions[segment.slot + p] = segment.position + static_cast<int32_t>(p);
    }
  }
};

/// Copies a row of embeddings.
struct GatherRow {
  const float* rows;
  const int32_t* sources;
  int64_t width;
  float* to;
  template <class Lanes>
  GYRE_HOST_DEVICE void operator()(int64_t index, const Lanes& lanes) const {
    const int64_t source = sources[index];
    for (int64_t c = lanes.first; c < width; c += lanes.count)
      to[index * width + c] = source < 0 ? 0.0F : rows[source * width + c];
  }
};

/// Host values in the memory of a stream: themselves, or a copy.
template <class T>
class There {
 public:
  There(std::span<const T> values, Stream& stream) : values_(values) {
    if (stream.space() == MemorySpace::host) return;
    copy_ = Buffer<T>(std::ssize(values), MemorySpace::device);
    stream.copy(copy_.data(), values.data(), values.size_bytes());
  }
  const T* data() const { return copy_.data() == nullptr ? values_.data() : copy_.data(); }

 private:
  std::span<const T> values_;
  Buffer<T> copy_;
};

/// Values that are computed in the memory of a stream.
template <class T>
class Result {
 public:
  Result(int64_t count, Stream& stream) : stream_(stream), values_(count) {
    if (stream.space() == MemorySpace::device) there_ = Buffer<T>(count, MemorySpace::device);
  }
  T* data() { return there_.data() == nullptr ? values_.data() : there_.data(); }
  std::vector<T> take() {
    if (there_.size() > 0) stream_.copy(values_.data(), there_.data(), there_.size() * sizeof(T));
    stream_.synchronize();
    return std::move(values_);
  }

 private:
  Stream& stream_;
  std::vector<T> values_;
  Buffer<T> there_;
};

void check(const SegmentList& list, int64_t tokens) {
  for (size_t i = 0; i < list.segments.size(); ++i) {
    const auto& [slot, slots, first, length, position] = list.segments[i];
    if (length < 0 || length > slots)
      throw_usage("segment {}: {} real tokens in {} slots; there are 0 to {}", i, length, slots,
                  slots);
    if (first < 0 || first + length > tokens)
      throw_usage("segment {}: tokens {} to {} of {}", i, first, first + length, tokens);
  }
}

/// The segments in pieces of so few slots that a device has many of them. `length` counts the real
/// tokens of the later pieces as well, for the label of the last slot.
std::vector<Segment> in_pieces(std::span<const Segment> segments) {
  constexpr int64_t most = 1024;
  std::vector<Segment> pieces;
  for (const Segment& whole : segments)
    for (int64_t begin = 0; begin < whole.slots; begin += most) {
      const auto skipped = static_cast<int32_t>(begin);
      pieces.push_back({whole.slot + begin, std::min(most, whole.slots - begin),
                        whole.token + begin, whole.length - skipped, whole.position + skipped});
    }
  return pieces;
}

}  // namespace

SlotArrays pack_slots(const SegmentList& list, std::span<const int32_t> tokens, Stream& stream) {
  check(list, std::ssize(tokens));
  const std::vector<Segment> pieces = in_pieces(list.segments);
  const There<Segment> segments(pieces, stream);
  const There<int32_t> source(tokens, stream);
  const int64_t slots = list.slots();
  Result<int32_t> ids(slots, stream), labels(slots, stream), positions(slots, stream);
  for_rows(
      stream, std::ssize(pieces),
      FillSegment{segments.data(), source.data(), ids.data(), labels.data(), positions.data()});
  return {ids.take(), labels.take(), positions.take()};
}

std::vector<float> gather_embeddings(std::span<const float> rows, std::span<const int32_t> sources,
                                     int64_t width, Stream& stream) {
  const There<float> from(rows, stream);
  const There<int32_t> map(sources, stream);
  Result<float> to(std::ssize(sources) * width, stream);
  for_rows(stream, std::ssize(sources), GatherRow{from.data(), map.data(), width, to.data()});
  return to.take();
}

}  // namespace gyre
