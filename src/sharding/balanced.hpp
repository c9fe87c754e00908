#pragma once
// Balanced layouts: chunks of one size, an equal number per rank, assigned by cost.
//
//     cut the row into n = m·cp chunks of `chunk` slots (the row is padded on the right)
//     cost of a chunk = visible pairs of its queries: under a causal mask, of every real token,
//                       its position + 1
//     balanced:  take chunks by descending cost; each goes to the rank with the least cost so far
//                among those that have fewer than m
//
// O(n log n + n log cp). The joint variant searches for the assignment that minimises
//
//     max over ranks r of max(pairs_r · seconds_per_pair, kv_needed_r · seconds_per_kv_token)
//
// kv_needed is defined in sharding/cost.hpp, always under a causal mask:
//
//     for each start: the assignment above; chunks in stream order; assign_by_objective
//         (the last only if n · cp <= 2^28)
//         repeat 400 n times, at most 2,000,000 / max(1, cp/512)²:
//             pick a chunk x, and a chunk y: mostly from a rank that holds a neighbour of x
//             swap their ranks unless that raises
//                 Σ_r [(time of r / best maximum)^64 + 0.1 · kv_needed_r / mean by `balanced`]
//             by more than a threshold, which falls from 0.05 to 0.0005
//     return the best assignment visited: no slower than any start; 1 % of time weighs as much as
//         all keys that the assignment by compute needs
//
// The power approximates the maximum; unlike the maximum, it rewards every improvement of a slow
// rank. This is threshold accepting (Dueck and Scheuer, 1990) with a fixed random sequence: equal
// input gives an equal assignment. Packed documents with a long tail (64K slots, cp = 8, chunk 512)
// need 40 % of the ring's bytes under `balanced`; jointly 24 % at the same balance when
// communication takes as long as compute, 3 % when it takes ten times as long (bench/sharding.cpp).

#include <cstdint>
#include <vector>

#include "sharding/chunk_assignment.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// The chunk size used for `options.chunk` = 0: the largest power of two up to 512 that gives every
/// rank at least 16 chunks of the row (at least 1 slot). Smaller chunks balance better; larger ones
/// need fewer remote keys and give kernels longer runs.
int64_t balanced_chunk(int64_t slots, int cp);

/// Visible pairs of the queries in each chunk of `chunk` slots, [ceil(slots / chunk)], by
/// `pairs_of` (see LayoutOptions::pairs) or, without it, under a causal mask.
std::vector<int64_t> chunk_pairs(const SegmentBounds& bounds, int64_t chunk,
                                 const decltype(LayoutOptions::pairs)& pairs_of = {});

/// Result of a search for a balanced layout.
struct BalanceSearch {
  std::vector<int32_t> rank_of_chunk;
  int64_t chunk = 0;
  double cpu_seconds = 0;  ///< CPU time of the search in this thread
};
/// Assignment by compute alone. Throws a usage error for invalid boundaries, cp < 1 or a chunk that
/// is negative or exceeds int32.
BalanceSearch balance_compute(const SegmentBounds& bounds, const LayoutOptions& options);
/// Assignment by compute and communication, O(n) moves. Throws as balance_compute does, and when a
/// time of options.time is negative or not finite.
BalanceSearch balance_joint(const SegmentBounds& bounds, const LayoutOptions& options);

/// The layout of an assignment over cp ranks; adjacent chunks of a rank are merged into one run.
Layout layout_of_assignment(const char* name, const SegmentBounds& bounds, int cp,
                            const BalanceSearch& search);

}  // namespace gyre
