#pragma once
// Index types. Mixing up global and local positions is *the* bug of sharded attention. So these
// types do not convert into each other: a conversion is a named call (see sharding/layout.hpp).
// Layouts use them: there, slots of streams, slots of shards and positions of documents meet.
// Rows of an array of a plan (rectangles, slices) and numbers of documents are plain int64_t.

#include <compare>
#include <cstdint>
#include <limits>

#include "core/host_device.hpp"

namespace gyre {

/// A 64-bit index with a type of its own. Differences and sizes are plain int64_t.
template <class Tag>
class Index {
 public:
  constexpr Index() = default;
  constexpr explicit Index(int64_t value) : value_(value) {}
  constexpr int64_t value() const { return value_; }

  friend constexpr auto operator<=>(Index, Index) = default;
  friend constexpr Index operator+(Index a, int64_t n) { return Index(a.value_ + n); }
  friend constexpr Index operator-(Index a, int64_t n) { return Index(a.value_ - n); }
  friend constexpr int64_t operator-(Index a, Index b) { return a.value_ - b.value_; }
  constexpr Index& operator++() { return ++value_, *this; }
  constexpr Index& operator+=(int64_t n) { return value_ += n, *this; }

 private:
  int64_t value_ = 0;
};

using GlobalToken = Index<struct GlobalTokenTag>;  ///< slot in the packed stream of all ranks
using LocalToken = Index<struct LocalTokenTag>;    ///< slot in the shard of one rank
using DocPosition = Index<struct DocPositionTag>;  ///< position inside a document (RoPE, masks)

/// Maximum number of slots of a stream: segment boundaries are 32-bit.
inline constexpr int64_t max_slots = std::numeric_limits<int32_t>::max();

/// A bound above any document length: the end of an endless document, and the largest window.
inline constexpr int64_t max_positions = int64_t{1} << 40;

/// a / b, rounded down or up; b > 0, a of any sign.
GYRE_HOST_DEVICE constexpr int64_t floor_div(int64_t a, int64_t b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}
GYRE_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return -floor_div(-a, b);
}
GYRE_HOST_DEVICE constexpr int64_t round_up(int64_t a, int64_t multiple) {
  return ceil_div(a, multiple) * multiple;
}

/// Converts `value` >= 0, such as a computed number of bytes, to an integer: rounded down, and at
/// most the largest int64_t.
constexpr int64_t saturated(double value) {
  return value < 0x1p63 ? static_cast<int64_t>(value) : std::numeric_limits<int64_t>::max();
}

}  // namespace gyre
