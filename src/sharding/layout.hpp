#pragma once
// Layouts: which tokens of a packed batch a context-parallel rank owns.
//
// A layout is a value: for every rank, a list of fragments. Schedules, kernels, maps and reports
// read nothing else, so that none of them contains a case for a particular layout.
//
// DualChunkSwap cuts every segment into 2·cp equal chunks and gives rank r the chunks r and
// 2·cp-1-r, so that under a causal mask every rank has the same work:
//
//     cp = 4, one segment of 16 slots, chunks of 2
//     chunk      0    1    2    3    4    5    6    7
//     slots     0 1  2 3  4 5  6 7  8 9 1011 1213 1415
//     rank       0    1    2    3    3    2    1    0
//     rank 0 holds 0 1 14 15, rank 1 holds 2 3 12 13, rank 2 holds 4 5 10 11, rank 3 holds 6 7 8 9
//
// Slots past a segment's real length are padding. Fragments name real tokens only: with chunk
// length c and real length R, the first chunk holds clamp(R - r·c, 0, c) of them and the second
// clamp(R - (2·cp-1-r)·c, 0, c), a prefix of the rank's local slots of that segment. (R / cp would
// be wrong on some rank for every R but 0, L/2 and L.)

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/index.hpp"

namespace gyre {

/// `length` real tokens of one segment on one rank: positions start, start + stride, ... of the
/// document lie at the local slots local_begin, local_begin + 1, ...
struct Fragment {
  SegmentIndex segment;
  DocPosition start;
  int64_t stride = 1;
  int64_t length = 0;
  LocalToken local_begin;
  friend bool operator==(const Fragment&, const Fragment&) = default;
};

/// What one rank holds.
struct Shard {
  std::vector<Fragment> fragments;  ///< ascending in local_begin; empty fragments are left out
  int64_t slots = 0;                ///< local slots, padding included
};

struct Layout {
  std::string name;
  std::vector<Shard> shards;  ///< [cp]
  int cp() const { return static_cast<int>(shards.size()); }
};

/// Boundaries of a packed stream of N segments, each [N + 1], from 0 and non-decreasing: `padded`
/// is where segments lie (slots), `real` counts valid tokens, which are the first ones of each slot
/// range.
struct SegmentBounds {
  std::span<const int32_t> real;
  std::span<const int32_t> padded;
  int64_t segments() const { return std::ssize(padded) - 1; }
  int64_t real_length(int64_t i) const {
    return real[static_cast<size_t>(i) + 1] - real[static_cast<size_t>(i)];
  }
  int64_t slot_length(int64_t i) const {
    return padded[static_cast<size_t>(i) + 1] - padded[static_cast<size_t>(i)];
  }
};

/// DualChunkSwap of every segment over `cp` ranks. Throws a usage error that names the first
/// segment whose slot length is not a multiple of 2·cp (a multiple of cp, or only the total, is not
/// enough), with the nearest valid length.
Layout dual_chunk_swap(const SegmentBounds& bounds, int cp);

/// The slot of the packed stream behind each local slot of `rank`, padding included: int32 [slots].
/// (The index list by which ids, labels and positions are gathered.)
std::vector<int32_t> dual_chunk_swap_index(const SegmentBounds& bounds, int cp, int rank);

/// Inverse: rank and local slot of every slot of the stream.
struct Owner {
  int32_t rank;
  int32_t local;
  friend bool operator==(const Owner&, const Owner&) = default;
};
std::vector<Owner> dual_chunk_swap_owner(const SegmentBounds& bounds, int cp);

}  // namespace gyre
