#pragma once
// Boundaries and layouts for tests: random layouts of every kind, and packs of long-tailed
// documents.

#include <rapidcheck.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "errors.hpp"
#include "packing/lengths.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
/// As RapidCheck prints what it has drawn, when a property fails.
inline void showValue(const LayoutKind& kind, std::ostream& os) {
  os << kind.name;
}
}  // namespace gyre

namespace gyre::test {

/// Boundaries of a stream, built segment by segment.
struct Bounds {
  std::vector<int32_t> real = {0}, padded = {0};
  SegmentBounds view() const { return {real, padded}; }
  void add(int64_t length, int64_t slots) {
    real.push_back(real.back() + static_cast<int32_t>(length));
    padded.push_back(padded.back() + static_cast<int32_t>(slots));
  }
};

/// Segments of the given real and slot lengths.
inline Bounds bounds_of(const std::vector<int64_t>& real, const std::vector<int64_t>& slots) {
  Bounds bounds;
  for (size_t i = 0; i < slots.size(); ++i) bounds.add(real[i], slots[i]);
  return bounds;
}
/// Segments that fill their slots.
inline Bounds full_bounds(const std::vector<int64_t>& slots) {
  return bounds_of(slots, slots);
}

/// Up to 10 segments of up to 30 tokens, tiny, empty and all-padding ones included, in slots that
/// are multiples of `multiple`.
inline Bounds arbitrary_bounds(int64_t multiple) {
  Bounds bounds;
  const int segments = *rc::gen::inRange(0, 11);
  for (int i = 0; i < segments; ++i) {
    const int64_t length = *rc::gen::weightedOneOf<int64_t>(
        {{1, rc::gen::inRange<int64_t>(0, 3)}, {2, rc::gen::inRange<int64_t>(0, 31)}});
    const int64_t spare = *rc::gen::weightedElement<int64_t>({{3, 0}, {1, 1}});
    bounds.add(length, round_up(length, multiple) + spare * multiple);
  }
  return bounds;
}

/// A layout, and the arguments that it was made from.
struct LayoutCase {
  std::string kind;
  LayoutOptions options;
  Bounds bounds;
  Layout layout;
};

/// A layout of any kind for 1 to 16 ranks.
inline LayoutCase arbitrary_layout() {
  LayoutCase result;
  const LayoutKind& kind = *rc::gen::elementOf(layout_kinds());
  result.kind = kind.name;
  result.options.cp = *rc::gen::inRange(1, 17);
  result.options.stripe = *rc::gen::inRange<int64_t>(1, 6);
  result.options.chunk = *rc::gen::inRange<int64_t>(0, 9);
  result.bounds = arbitrary_bounds(kind.segment_multiple(result.options.cp));
  result.layout = kind.make(result.bounds.view(), result.options);
  return result;
}

/// `count` rows of `slots` slots, full of documents with a long tail; the lengths are the same on
/// every machine. Documents longer than slots / 4 are cut, and so is the last one of a row.
inline std::vector<Bounds> long_tailed_packs(int count, int64_t slots) {
  LengthSpec spec;
  spec.distribution = "long-tailed";
  spec.count = count * slots / 128;
  spec.max = slots / 4;
  std::vector<Bounds> packs(1);
  for (const int64_t length : draw_lengths(spec)) {
    if (packs.back().view().slots() == slots) {
      if (std::ssize(packs) == count) break;
      packs.emplace_back();
    }
    const int64_t fitting = std::min(length, slots - packs.back().view().slots());
    packs.back().add(fitting, fitting);
  }
  return packs;
}

}  // namespace gyre::test
