#pragma once
// Duration of a library's all-gather or reduce-scatter. Each of n ranks has a block of b bytes:
//
//     ring    n - 1 rounds of a block each, to the neighbour
//     tree    ceil(log2 n) rounds of 1, 2, 4, ... blocks (recursive doubling or halving, Bruck's
//             where n is no power of two):  ceil(log2 n) latency + (n-1) b / bandwidth
//
// A tree has fewer latencies. A ring sends only to neighbours, so that shared links carry little.
// Libraries use a tree for little data and a ring for much: MPICH from 512 KiB of all blocks on
// (Thakur, Rabenseifner, Gropp, IJHPCA 19, 2005), NCCL similarly (PAT and ring). Every round of a
// tree waits for the slowest link: that of the outermost tier that the group spans.
//
// A ring visits the ranks of a node in turn, then those of the next node. NCCL builds several
// rings, which leave a node through different NICs, and sends a part of every block over each. In a
// round, the m ranks of a node therefore send one block to the next node over their m links. (With
// a single ring, one rank sends the whole block, and its link has the bandwidth of all m.) U_t is
// the number of ranks of the group in the unit of tier t that has the fewest, and U_-1 = 1. A
// rank's link of tier t carries the share
//
//     s_t = 1 / U_(t-1) - 1 / U_t,   in the outermost tier   1 / U_(t-1)
//
// of each block. The rounds follow one another without a gap, so that a link's time is that of one
// message of all its bytes, (n-1) s_t b; the slowest link decides. A block crosses each edge of the
// ring but one: with N_t units of tier t (N_-1 = n), the latencies are the sum over t of
// (N_(t-1) - N_t) latency_t. NCCL's own model (src/graph/tuning.cc) has the same latencies and
// bandwidths: the bandwidth of all channels, nNodes - 1 latencies of the network, and those of a
// node for the other rounds. Example, 16 ranks in nodes of 8:
//
//     14 latency_0 + latency_1 + max(15 7/8 b / bandwidth_0, 15 1/8 b / bandwidth_1)
//
// An all-to-all of a library is simulated as messages from each rank to every other (MPI's pairwise
// exchange, NCCL's grouped sends).

#include <array>
#include <cstdint>
#include <vector>

#include "predict/machine.hpp"

namespace gyre {

enum class CollectiveAlgorithm : uint8_t { ring, tree };
const char* name_of(CollectiveAlgorithm algorithm);

/// A ring is used when all blocks together have at least this many bytes.
inline constexpr int64_t ring_from_bytes = 512 << 10;

/// How a group of ranks lies in the units of a tier.
struct TierSpread {
  int units = 1;         ///< number of units with a rank of the group
  int ranks_of_one = 1;  ///< ranks of the group in the unit that has the fewest
};
/// Returns the spread over each tier, from the innermost one to the first with a single unit, of
/// the group of ranks first, first + stride, ...
std::vector<TierSpread> spread_of(const std::vector<LinkTier>& tiers, int64_t first, int64_t stride,
                                  int ranks);

struct CollectiveTime {
  CollectiveAlgorithm algorithm = CollectiveAlgorithm::ring;
  double seconds = 0;
  /// [tier] of a rank's link: seconds for which it is busy, and bytes that it carries.
  std::array<double, max_tiers> busy = {};
  std::array<int64_t, max_tiers> bytes = {};
};

/// Duration for a group of `ranks` ranks with blocks of `block` bytes.
CollectiveTime collective_time(const std::vector<LinkTier>& tiers,
                               const std::vector<TierSpread>& spread, int ranks, int64_t block);

}  // namespace gyre
