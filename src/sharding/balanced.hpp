#pragma once
// The balanced layouts: equal counts of fixed-size chunks, dealt by their cost.
//
//     cut the row into n = m·cp chunks of `chunk` slots (the row is padded on the right)
//     cost of a chunk = visible pairs of its queries: under a causal mask, of every real token,
//                       its position + 1
//     balanced:  chunks by descending cost, each to the rank with the least so far
//                among those that have fewer than m
//
// O(n log n + n log cp). The joint variant looks for the deal that is best by
//
//     max over ranks r of max(pairs_r · seconds_per_pair, kv_needed_r · seconds_per_kv_token)
//
// where kv_needed is what sharding/cost.hpp says, under a causal mask whatever the mask is:
//
//     for each start: the deal above, chunks in stream order, a deal by the objective itself
//         (the last one of n · cp <= 2^28)
//         repeat 400 n times, at most 2,000,000 / max(1, cp/512)²:
//             pick a chunk x, and y: mostly of the rank that holds a neighbour of x, else any
//             swap their ranks unless that raises
//                 Σ_r (time of r / slowest time so far)^64 + 0.1 · needed by r / mean of a start
//             by more than a threshold, which falls from 0.05 to 0.0005
//     return the best deal that was met: no slower than any start; 1 % of time counts as much as
//         all the keys that the deal by compute needs
//
// The power approximates the maximum; unlike the maximum, it rewards every improvement of a slow
// rank. This is threshold accepting (Dueck and Scheuer, 1990) with a fixed random sequence: the
// same input gives the same deal. Of the ring's bytes, packed documents with a long tail (64K
// slots, cp = 8, chunk 512) need 40 % under `balanced`, 24 % at the same balance when communication
// takes as long as compute, and 3 % when it takes ten times as long; see bench/sharding.cpp.

#include <cstdint>
#include <vector>

#include "sharding/chunk_deal.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// The chunk size that `options.chunk` = 0 stands for: the largest power of two up to 512 that
/// leaves every rank at least 16 chunks of the row (at least 1). Smaller chunks balance better;
/// larger ones need fewer foreign keys and give kernels longer runs.
int64_t balanced_chunk(int64_t slots, int cp);

/// Visible pairs of the queries in each chunk of `chunk` slots, [ceil(slots / chunk)]: what
/// LayoutOptions::pairs says, or causal ones.
std::vector<int64_t> chunk_pairs(const SegmentBounds& bounds, int64_t chunk,
                                 const decltype(LayoutOptions::pairs)& pairs_of = {});

/// How a balanced layout was found.
struct BalanceSearch {
  std::vector<int32_t> rank_of_chunk;
  int64_t chunk = 0;
  double cpu_seconds = 0;  ///< CPU time of this thread that the search took
};
/// The deal by compute alone. Throws a usage error for broken boundaries, cp < 1 or a chunk that is
/// negative or longer than int32.
BalanceSearch balance_compute(const SegmentBounds& bounds, const LayoutOptions& options);
/// The deal by compute and communication, O(n) moves. Throws the same, and when a time of
/// options.time is negative or not finite.
BalanceSearch balance_joint(const SegmentBounds& bounds, const LayoutOptions& options);

/// The layout of a deal over cp ranks; neighbouring chunks of a rank are one piece.
Layout layout_of_deal(const char* name, const SegmentBounds& bounds, int cp,
                      const BalanceSearch& search);

}  // namespace gyre
