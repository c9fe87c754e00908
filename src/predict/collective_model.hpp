#pragma once
// How long an all-gather or a reduce-scatter of a library takes. n ranks have a block of b bytes
// each:
//
//     ring    n - 1 rounds of a block each, to the neighbour:       (n-1) (latency + b / bandwidth)
//     tree    ceil(log2 n) rounds of 1, 2, 4, ... blocks (recursive doubling or halving, Bruck's
//             where n is no power of two):  ceil(log2 n) latency + (n-1) b / bandwidth
//
// A tree has fewer latencies; a ring sends to neighbours alone, so that links that ranks share
// carry little. Libraries take a tree for little data and a ring for much: MPICH from 512 KiB of
// all blocks on (Thakur, Rabenseifner, Gropp, IJHPCA 19, 2005), NCCL similarly (PAT and ring).
//
// All ranks of a round wait for the slowest link among them: that of the outermost tier that the
// group spans.
//
// An all-to-all of a library is each rank's messages to the others (MPI's pairwise exchange, NCCL's
// grouped sends), and is simulated as such.

#include <cstdint>

#include "predict/machine.hpp"

namespace gyre {

enum class CollectiveAlgorithm : uint8_t { ring, tree };
const char* name_of(CollectiveAlgorithm algorithm);

/// Bytes of all blocks from which on a ring is taken.
inline constexpr int64_t ring_from_bytes = 512 << 10;

struct CollectiveTime {
  CollectiveAlgorithm algorithm = CollectiveAlgorithm::ring;
  double seconds = 0;
};

/// Of `ranks` ranks with `block` bytes each, of which the slowest link is `link`.
CollectiveTime collective_time(const LinkTier& link, int ranks, int64_t block);

}  // namespace gyre
