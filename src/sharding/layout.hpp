#pragma once
// Layouts: which slots of a packed stream a context-parallel rank owns.
//
// A layout is a value: for every rank the runs of stream slots that it owns, and the fragments
// derived from them, which are runs of real tokens of one document. Index maps, schedules, kernels
// and reports read only these, so none of them has a case for a particular layout.
//
//     two segments, real lengths 5 and 2 in 8 and 4 slots, cp = 2
//     slots        0 1 2 3 4 5 6 7 | 8 9 10 11
//     tokens       a b c d e . . . | x y .  .
//     layout       dual-chunk-swap: chunks of 2 and of 1; a run is first slot + length
//     rank 0       runs 0+2, 6+2, 8+1, 11+1     holds a b . . x .   fragments ab, x
//     rank 1       runs 2+2, 4+2, 9+1, 10+1     holds c d e . y .   fragments cd, e, y
//
// All ranks hold the same number of slots. A layout that needs a longer stream than given appends
// padding on the right: slots s >= stream_slots.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/index.hpp"

namespace gyre {

/// `length` slots of the stream on one rank: start, start + stride, ... lie at the local slots
/// local_begin, local_begin + 1, ...
struct SlotRun {
  GlobalToken start;
  int64_t stride = 1;
  int64_t length = 0;
  LocalToken local_begin;
  friend bool operator==(const SlotRun&, const SlotRun&) = default;
};

/// `length` real tokens of one segment on one rank: positions start, start + stride, ... of the
/// document lie at the local slots local_begin, local_begin + 1, ...
struct Fragment {
  int64_t segment = 0;
  DocPosition start;
  int64_t stride = 1;
  int64_t length = 0;
  LocalToken local_begin;
  friend bool operator==(const Fragment&, const Fragment&) = default;
};

/// The slots and tokens that one rank holds.
struct Shard {
  std::vector<SlotRun> runs;        ///< ascending in local_begin; cover all local slots
  std::vector<Fragment> fragments;  ///< ascending in local_begin; none is empty
  int64_t slots = 0;                ///< local slots, padding included
};

struct Layout {
  std::string name;
  std::vector<Shard> shards;  ///< [cp]
  int64_t stream_slots = 0;   ///< slots of the stream that was sharded
  int64_t padded_slots = 0;   ///< stream_slots and padding on the right: cp · slots_of_rank()
  int cp() const { return static_cast<int>(shards.size()); }
  /// Local slots, the same on every rank.
  int64_t slots_of_rank() const { return shards.empty() ? 0 : padded_slots / cp(); }
  const Shard& shard(int rank) const {
    GYRE_CHECK(rank >= 0 && rank < cp(), "layout {}: rank {} of {}", name, rank, cp());
    return shards[rank];
  }
};

/// Segment boundaries of a packed stream, each [segments + 1], from 0, non-decreasing. `padded`:
/// prefix sums of slots. `real`: of valid tokens, which fill the first slots of each segment.
struct SegmentBounds {
  std::span<const int32_t> real;
  std::span<const int32_t> padded;
  int64_t segments() const { return std::ssize(padded) - 1; }
  int64_t slots() const { return padded.back(); }
  int64_t begin(int64_t i) const { return padded[i]; }
  int64_t real_length(int64_t i) const { return int64_t{real[i + 1]} - real[i]; }
  int64_t slot_length(int64_t i) const { return int64_t{padded[i + 1]} - padded[i]; }
};

/// Throws a usage error that names the segment unless the boundaries satisfy SegmentBounds.
void check_bounds(const SegmentBounds& bounds);

/// Throws a usage error that names the segment unless `bounds` [segments + 1] run from 0 to the
/// layout's stream_slots without decreasing.
void check_boundaries(const Layout& layout, std::span<const int32_t> bounds);

/// The layout in which rank r owns the slots of runs[r], in that order; sets local_begin. Every
/// slot below the total must be in exactly one run (checked in debug builds), and all ranks must
/// own the same number of slots (always checked).
Layout make_layout(std::string name, const SegmentBounds& bounds,
                   std::vector<std::vector<SlotRun>> runs);

/// The stream slot of each local slot of `rank`, padding included: int32 [slots], the index list
/// that gathers ids, labels, positions and masks. Padding that the layout appended has slots >=
/// layout.stream_slots.
std::vector<int32_t> shard_index(const Layout& layout, int rank);

/// Rank and local slot of a stream slot.
struct Owner {
  int32_t rank;
  int32_t local;
  friend bool operator==(const Owner&, const Owner&) = default;
};
/// Inverse of all ranks' index lists: [padded_slots].
std::vector<Owner> slot_owners(const Layout& layout);

/// The segment of each slot, [bounds.back()]: the last i with bounds[i] <= slot. This is an
/// upper-bound search, which skips empty segments; a lower-bound search would be wrong at the first
/// slot of every segment.
std::vector<int32_t> segment_ids(std::span<const int32_t> bounds);

}  // namespace gyre
