#pragma once
// Packed streams under Ulysses: heads exchanged for tokens over the ranks of the run.

#include <string>
#include <vector>

#include "harness/row.hpp"
#include "io/packed_file.hpp"

namespace gyre {

/// One step of Ulysses over all bins, measured.
struct UlyssesResult : MeasuredRow {
  std::string step;
  int ranks = 1;
  int64_t slots = 0;    ///< of a rank, all bins
  int64_t padding = 0;  ///< slots that the step appended to the streams
  double bytes = 0;     ///< sent by all ranks, counted
  double formula = 0;   ///< the same by its closed form; NaN: there is none
  double step_ms = 0;   ///< of the slowest rank, all bins
};
const Table<UlyssesResult>& ulysses_table();

/// The attention whose tensors are exchanged.
struct UlyssesHeads {
  int64_t heads = 32, kv_heads = 8, head_dim = 128;
};

/// Runs the steps over the ranks of `world` for every bin of the streams (the same on all ranks;
/// ids, no embeddings) and adds to `checks`:
///
///     lists      the ranks' documents are gathered, in their order, and split again
///     slices     padding to a multiple of the ranks, contiguous slices of ids, whole positions;
///                slices gathered without their padding are the stream; gradients split back
///     exchange   queries, keys and values: a rank's heads of all tokens; backward sums over the
///                copies of a key head; attention's output goes back, in both of its memory orders
///     swapped    the same from dual-chunk-swap shards, with tokens put in the order of the stream
///
/// Every element of a tensor says which head, slot and lane it is, so that what arrives is compared
/// with what belongs there. Throws a usage error, with the nearest valid number, for heads that do
/// not divide over the ranks. Collective.
std::vector<UlyssesResult> run_ulysses(const PackedHeader& header, const PackedSlots& slots,
                                       const UlyssesHeads& heads, Communicator& world, bool check,
                                       Verification& checks);

}  // namespace gyre
