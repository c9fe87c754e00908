#pragma once
// Ulysses on packed streams: exchanges heads for tokens between the ranks of the run.

#include <string>
#include <vector>

#include "harness/row.hpp"
#include "io/packed_file.hpp"

namespace gyre {

/// Measurements of one step of Ulysses over all bins.
struct UlyssesResult : MeasuredRow {
  std::string step;
  int ranks = 1;
  int64_t slots = 0;    ///< per rank, all bins
  int64_t padding = 0;  ///< slots that the step appended to the streams
  double bytes = 0;     ///< counted bytes sent by all ranks
  double formula = 0;   ///< `bytes` by the closed form; NaN if there is none
  double step_ms = 0;   ///< time of the slowest rank, all bins
};
const Table<UlyssesResult>& ulysses_table();

/// The attention whose tensors are exchanged.
struct UlyssesHeads {
  int64_t heads = 32, kv_heads = 8, head_dim = 128;
};

/// Runs the steps over the ranks of `world` for every bin of the streams (the same on all ranks;
/// ids, no embeddings) and adds to `checks`:
///
///     lists      the ranks' documents are gathered in rank order and split again
///     slices     the stream is padded to a multiple of the ranks and cut into contiguous slices of
///                ids, with whole positions; gathered slices, unpadded, are the stream; gradients
///                are split back
///     exchange   each rank gets its heads of q, k and v for all tokens; backward sums over the
///                copies of a key head; the output goes back, in both of its memory orders
///     swapped    exchange, from dual-chunk-swap shards, with tokens reordered as in the stream
///
/// Each element's value encodes its head, slot and lane, so its place is checked, too. Throws a
/// usage error with the nearest valid number if heads do not divide over the ranks. Collective.
std::vector<UlyssesResult> run_ulysses(const PackedHeader& header, const PackedSlots& slots,
                                       const UlyssesHeads& heads, Communicator& world, bool check,
                                       Verification& checks);

}  // namespace gyre
