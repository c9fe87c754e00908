#pragma once
// Which queries meet which keys: rectangles of local rows with a mask.

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "attention/mask.hpp"
#include "core/index.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// The mask of a rectangle, in positions of the document: query i is at position
/// offset + i · q_stride and key j at j · k_stride, both counted from the rectangle's corner. Query
/// i sees key j if
///     with `causal`:            key's position <= query's
///     with `window` > 0:        key's position > query's - window
/// An inverse causal mask has a window and is not causal.
struct Mask {
  bool causal = false;
  int64_t offset = 0;
  int64_t q_stride = 1, k_stride = 1;
  int64_t window = 0;

  /// Keys [begin_key(i), end_key(i)) are visible to query i. Not clipped to the rectangle: the
  /// caller clamps both to [0, k_length].
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

/// Rows [q_begin, q_begin + q_length) of a query array meet rows [k_begin, k_begin + k_length) of a
/// key array. Queries and keys of a rectangle are runs of one document.
struct Rectangle {
  LocalToken q_begin;
  int64_t q_length = 0;
  LocalToken k_begin;
  int64_t k_length = 0;
  Mask mask;
  /// Number of visible (query, key) pairs.
  int64_t pairs() const;
  friend bool operator==(const Rectangle&, const Rectangle&) = default;
};

/// Whether rectangles are cut down to the rows that see something.
enum class Trim {
  both,    ///< queries and keys
  nothing  ///< rectangles keep their corners, so that tiles counted from them do not move
};

/// The visible pairs between the queries of one shard and the keys of another, sorted by q_begin;
/// rectangles without a visible pair are left out. Documents never see each other. Pads are in no
/// fragment, hence in no rectangle. Segments are the mask's documents. O(fragments log fragments +
/// pairs of fragments of a document · its regions).
std::vector<Rectangle> intersect(const Shard& queries, const Shard& keys, const MaskRule& rule,
                                 Trim trim = Trim::both);

/// Sum of pairs().
int64_t total_pairs(std::span<const Rectangle> rectangles);

}  // namespace gyre
