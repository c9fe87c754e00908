#pragma once
// Cost of a layout per rank under a causal mask: pairs to compute and keys to fetch.
//
// A query at position p of a document attends to p + 1 keys. A rank that holds queries of a
// document up to position p needs keys 0 .. p; other ranks send those that it does not hold:
//
//     needed(r) = Σ over documents of (largest position on r + 1) - tokens of it on r
//
// A ring sends every block to every rank: each receives (cp - 1)/cp of the stream. The share of it
// that is needed bounds what a schedule can save by sending keys only to ranks that use them.

#include <cstdint>
#include <vector>

#include "sharding/layout.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

struct RankCost {
  int64_t real_tokens = 0;
  int64_t pairs = 0;      ///< visible causal pairs of the rank's queries, per head
  int64_t kv_needed = 0;  ///< tokens whose keys and values must come from other ranks
};

struct LayoutCost {
  std::vector<RankCost> ranks;  ///< [cp]
  int64_t slots = 0;            ///< slots per rank
  int64_t pieces = 0;           ///< fragments of all ranks; in kernels, runs of consecutive queries

  int64_t pairs() const;
  int64_t max_pairs() const;
  /// max/mean of pairs over ranks; 1 is perfect balance, and the value without pairs.
  double pair_ratio() const;
  /// Needed share of the ring's traffic: mean over ranks, and the maximum. The ring moves (cp - 1)
  /// · slots tokens to each rank. 0 for cp = 1.
  double needed_share() const;
  double largest_needed_share() const;
  /// Seconds of the slowest rank if compute and communication overlap fully.
  double seconds(const TimeModel& time) const;
};

/// The cost of every rank under a layout, in O(fragments log fragments).
LayoutCost layout_cost(const Layout& layout);

/// tokens[r][s]: tokens of rank s whose keys and values rank r needs; 0 on the diagonal. Row sums
/// are kv_needed.
std::vector<std::vector<int64_t>> kv_traffic(const Layout& layout);

}  // namespace gyre
