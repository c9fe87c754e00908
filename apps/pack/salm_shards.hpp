#pragma once
// Shards of streams of text and audio on context-parallel ranks.

#include "packing/salm.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Checks the stream packed for cp ranks: each rank's embeddings, labels and positions must be
/// those of its slots by the definition of dual-chunk-swap (with cp = 1, of all slots). All ranks
/// together then hold every pair of an embedding and a label once. No communication.
void check_salm_shards(const SalmPacked& packed, int cp, Verification& checks);

}  // namespace gyre
