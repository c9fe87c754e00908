#pragma once
// What a layout costs each rank under a causal mask: pairs to compute and keys to fetch.
//
// A query at position p of a document meets p + 1 keys. A rank that holds queries of a document up
// to position p needs the document's keys 0 .. p; those that it does not hold come from others:
//
//     needed(r) = Σ over documents of (largest position on r + 1) - tokens of it on r
//
// A ring sends every block to every rank, (cp - 1)/cp of the stream to each. The share of it that
// is needed says how much a schedule could save that sends keys only to ranks that use them.

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
  int64_t slots = 0;            ///< slots of a rank
  int64_t pieces = 0;           ///< fragments of all ranks: runs of consecutive queries in kernels

  int64_t pairs() const;
  int64_t max_pairs() const;
  /// max/mean of pairs over ranks (1: perfect; 1 when there are none).
  double pair_ratio() const;
  /// Share of the ring's traffic that is needed: mean over ranks, and of the rank that needs most.
  /// The ring moves (cp - 1) · slots tokens to each rank; 0 for cp = 1.
  double needed_share() const;
  double largest_needed_share() const;
  /// Seconds of the slowest rank if compute hides communication: max over ranks of the larger one.
  double seconds(const TimeModel& time) const;
};

/// O(fragments log fragments).
LayoutCost layout_cost(const Layout& layout);

/// tokens[r][s]: tokens of rank s whose keys and values rank r needs; 0 on the diagonal. Row sums
/// are kv_needed.
std::vector<std::vector<int64_t>> kv_traffic(const Layout& layout);

}  // namespace gyre
