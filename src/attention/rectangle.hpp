#pragma once
// Rectangles of visible pairs: local query rows x local key rows, with a mask.

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "attention/mask.hpp"
#include "core/index.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// The mask of a rectangle, by document positions relative to its corner: query i is at position
/// offset + i · q_stride, key j at j · k_stride. Query i sees key j if
///     with `causal`:            key's position <= query's
///     with `window` > 0:        key's position > query's - window
/// A window without `causal` hides only early keys (an inverse causal mask).
struct Mask {
  bool causal = false;
  int64_t offset = 0;
  int64_t q_stride = 1, k_stride = 1;
  int64_t window = 0;

  /// Query i sees keys [begin_key(i), end_key(i)). Not clipped to the rectangle: the caller clamps
  /// both to [0, k_length].
  int64_t begin_key(int64_t i) const {
    if (window == 0) return std::numeric_limits<int64_t>::min();
    return floor_div(offset + i * q_stride - window, k_stride) + 1;
  }
  int64_t end_key(int64_t i) const {
    if (!causal) return std::numeric_limits<int64_t>::max();
    return floor_div(offset + i * q_stride, k_stride) + 1;
  }
  bool full() const { return !causal && window == 0; }
  friend bool operator==(const Mask&, const Mask&) = default;
};

/// Attention of rows [q_begin, q_begin + q_length) of a query array to key rows [k_begin, k_begin +
/// k_length). Queries and keys are runs of one document.
struct Rectangle {
  int64_t q_begin = 0;
  int64_t q_length = 0;
  int64_t k_begin = 0;
  int64_t k_length = 0;
  Mask mask;
  int64_t q_end() const { return q_begin + q_length; }
  int64_t k_end() const { return k_begin + k_length; }
  /// Number of visible (query, key) pairs.
  int64_t pairs() const;
  friend bool operator==(const Rectangle&, const Rectangle&) = default;
};

/// Which rows without visible pairs are removed from rectangles.
enum class Trim {
  both,    ///< queries and keys
  nothing  ///< rectangles keep their corners, from which fixed tiles are counted
};

/// The visible pairs of the queries of one shard and the keys of another, as nonempty rectangles
/// sorted by q_begin. Segments are the mask's documents, which never see each other. Padding is in
/// no fragment, hence in no rectangle. O(fragments log fragments + pairs of fragments of a document
/// · its regions); of runs of keys only those between the first and the last key count.
std::vector<Rectangle> intersect(const Shard& queries, const Shard& keys, const MaskRule& rule,
                                 Trim trim = Trim::both);

int64_t total_pairs(std::span<const Rectangle> rectangles);

}  // namespace gyre
