#pragma once
// Duration of a library's all-gather or reduce-scatter. Each of n ranks has a block of b bytes:
//
//     ring    n - 1 rounds of a block each, to the neighbour:       (n-1) (latency + b / bandwidth)
//     tree    ceil(log2 n) rounds of 1, 2, 4, ... blocks (recursive doubling or halving, Bruck's
//             where n is no power of two):  ceil(log2 n) latency + (n-1) b / bandwidth
//
// A tree has fewer latencies. A ring sends only to neighbours, so that shared links carry little.
// Libraries use a tree for little data and a ring for much: MPICH from 512 KiB of all blocks on
// (Thakur, Rabenseifner, Gropp, IJHPCA 19, 2005), NCCL similarly (PAT and ring).
//
// Every round waits for the slowest link: that of the outermost tier that the group spans.
//
// An all-to-all of a library is simulated as messages from each rank to every other (MPI's pairwise
// exchange, NCCL's grouped sends).

#include <cstdint>

#include "predict/machine.hpp"

namespace gyre {

enum class CollectiveAlgorithm : uint8_t { ring, tree };
const char* name_of(CollectiveAlgorithm algorithm);

/// A ring is used when all blocks together have at least this many bytes.
inline constexpr int64_t ring_from_bytes = 512 << 10;

struct CollectiveTime {
  CollectiveAlgorithm algorithm = CollectiveAlgorithm::ring;
  double seconds = 0;
};

/// Duration for `ranks` ranks with blocks of `block` bytes whose slowest link is `link`.
CollectiveTime collective_time(const LinkTier& link, int ranks, int64_t block);

}  // namespace gyre
