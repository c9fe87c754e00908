#pragma once
// Streams of text and audio over context-parallel ranks.

#include "packing/salm.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Adds to `checks`, for the stream packed for cp ranks: each rank's embeddings, labels and
/// positions are those of the slots that dual-chunk-swap gives it, by its definition (with cp = 1,
/// of all slots), so that all ranks together hold every pair of an embedding and a label once. No
/// communication.
void check_salm_shards(const SalmPacked& packed, int cp, Verification& checks);

}  // namespace gyre
