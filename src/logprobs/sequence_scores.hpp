#pragma once
// Next-token predictions of sequences in one stream, over context-parallel ranks: the target id of
// each local row of logits, and the gather from local rows to one row per sequence.
//
//     serial:  for segment i of slots_i slots: target[t] = token[t + 1], none for its last slot
//              out[i, p] = value of slot begin_i + p, p < min(slots_i, width + 1) - 1; 0 beyond
//
// Dense input is a special case: rows of equal length are segments. `width` is U - 1 for an output
// of sequences of U tokens. Segments are slots (padded boundaries): between a sequence's true end
// and its padded end there are finite scores of padding ids, which callers mask. An empty segment
// makes a row of zeros.
//
// Three sequences abc, defgh, ij padded to 4, 8, 4 slots, cp = 2, dual-chunk-swap, "." = none:
//
//     stream     a b c 0 | d e f g h 0 0 0 | i j 0 0
//     targets    b c 0 . | e f g h 0 0 0 . | j 0 0 .
//     rank 0     slots 0 3, 4 5 10 11, 12 15      targets b . e f 0 . j .
//     rank 1     slots 1 2, 6 7 8 9, 13 14        targets c 0 g h 0 0 0 0
//
// No tensor is rolled, padded or permuted: all is index arithmetic of the layout. One all-gather
// covers all segments, 4 bytes per slot and value, after a small agreement on arguments. Based on
// from_parallel_logits_to_logprobs and from_parallel_logits_to_logprobs_packed_sequences of NeMo
// RL, where the slot without a target holds the first token of its segment (a roll); its score is
// dropped there too.

#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "sharding/distributed.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// Targets of the local slots of `rank`: [slots]. tokens [stream_slots] are the whole stream's,
/// `bounds` [segments + 1] the boundaries of its segments' slots. Targets are no_target (-1) for
/// the last slot of a segment and for padding of the layout. Throws a usage error unless the
/// boundaries run from 0 to tokens.size() == layout.stream_slots without decreasing.
std::vector<int32_t> next_token_targets(const Layout& layout, std::span<const int32_t> bounds,
                                        std::span<const int32_t> tokens, int rank);

/// Targets of the slots of `rank` as NeMo RL's packing precomputes them: the first min(true length,
/// slots) tokens of each sequence, then zeros, rolled left by one inside the segment. rows
/// [segments, row_width] hold one sequence each from the left; the real length of the last segment
/// may exceed its row (padding that fills up a stream), and the rest is zeros. Throws a usage error
/// that names the segment if bounds and rows do not fit. For a stream padded with id 0, only last
/// slots differ from next_token_targets.
std::vector<int32_t> rolled_targets(const Layout& layout, const SegmentBounds& bounds,
                                    std::span<const int32_t> rows, int64_t row_width, int rank);

/// Shape of gathered predictions.
struct PredictionShape {
  std::span<const int32_t> bounds;  ///< [segments + 1] boundaries of slots
  int64_t width = 0;                ///< U - 1: predictions of a sequence in the result
  int64_t row = 1;                  ///< values per prediction (K)
  int64_t segments() const { return std::ssize(bounds) - 1; }
  /// Number of predictions of segment i that fit the width.
  int64_t predictions(int64_t i) const;
};

/// Returns predictions [segments, width, row] on every rank, from local [slots, row] of each rank
/// of `cp`. Collective: arguments are compared, then one all-gather (none on one rank). All ranks
/// throw the same usage error if sizes do not fit or differ between ranks.
std::vector<float> gather_predictions(const Layout& layout, const PredictionShape& shape,
                                      std::span<const float> local, Communicator& cp);

/// Gradient of local [slots, row] from d_predictions [segments, width, row]; 0 for slots without a
/// prediction. `convention` as in sharding/distributed.hpp: `split` if all ranks compute the same
/// loss (no communication), `sum` if each computes a part of it (one reduce-scatter). Collective.
/// Throws the errors of gather_predictions, and one if conventions differ.
std::vector<float> gather_predictions_backward(const Layout& layout, const PredictionShape& shape,
                                               std::span<const float> d_predictions,
                                               Communicator& cp, GatherGradient convention);

}  // namespace gyre
