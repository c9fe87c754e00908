#pragma once
// Next-token predictions of sequences that share a stream, over context-parallel ranks: which id
// each local row of logits is asked for, and back from local rows to one row a sequence.
//
//     serial:  for each segment i of `slots` slots:  target[t] = token[t + 1]; its last slot has
//     none
//              out[i, p] = value of slot begin_i + p, p < min(slots_i, width + 1) - 1; 0 beyond
//
// Dense input is the same thing: rows of equal length are segments. `width` is U - 1 for an output
// of sequences of U tokens. Segments are those of the slots (padded boundaries): what lies between
// a sequence's true end and its padded one are finite scores of padding ids, which callers mask. An
// empty segment makes a row of zeros.
//
// Three sequences abc, defgh, ij padded to 4, 8, 4 slots, cp = 2, dual-chunk-swap, "." = none:
//
//     stream     a b c 0 | d e f g h 0 0 0 | i j 0 0
//     targets    b c 0 . | e f g h 0 0 0 . | j 0 0 .
//     rank 0     slots 0 3, 4 5 10 11, 12 15      targets b . e f 0 . j .
//     rank 1     slots 1 2, 6 7 8 9, 13 14        targets c 0 g h 0 0 0 0
//
// No roll, no padding and no permutation of a tensor: index arithmetic of the layout. One
// all-gather of all segments together, 4 bytes a slot and value, behind an agreement about
// arguments of a few numbers. After
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

/// Targets of the local slots of `rank`: [slots]. tokens [stream_slots] are those of the whole
/// stream, `bounds` [segments + 1] the boundaries of its segments' slots. no_target (-1) for the
/// last slot of a segment and for padding of the layout. Throws a usage error unless the boundaries
/// run from 0 to tokens.size() == layout.stream_slots without decreasing.
std::vector<int32_t> next_token_targets(const Layout& layout, std::span<const int32_t> bounds,
                                        std::span<const int32_t> tokens, int rank);

/// The same as NeMo RL's packing makes them ahead of time: the first min(true length, slots) tokens
/// of each sequence, then zeros, rolled left by one inside the segment, the slots of `rank`. rows
/// [segments, row_width] hold one sequence each from the left; the real length of the last segment
/// may exceed its row (slack by which a stream is filled up): the rest is zeros. Throws a usage
/// error that names the segment when bounds and rows do not fit. What differs from
/// next_token_targets of a stream that is padded with id 0 are last slots only.
std::vector<int32_t> rolled_targets(const Layout& layout, const SegmentBounds& bounds,
                                    std::span<const int32_t> rows, int64_t row_width, int rank);

/// Shape of what predictions are gathered into.
struct PredictionShape {
  std::span<const int32_t> bounds;  ///< [segments + 1] of slots
  int64_t width = 0;                ///< U - 1
  int64_t row = 1;                  ///< values of each prediction (K)
  int64_t segments() const { return std::ssize(bounds) - 1; }
  /// Predictions of segment i that have a place.
  int64_t predictions(int64_t i) const;
};

/// [segments, width, row] on every rank <- local [slots, row] of each rank of `cp`. Collective: one
/// all-gather, behind one agreement; none on one rank. All ranks throw the same usage error when
/// sizes do not fit or differ between ranks.
std::vector<float> gather_predictions(const Layout& layout, const PredictionShape& shape,
                                      std::span<const float> local, Communicator& cp);

/// The gradient of local [slots, row] from that of all predictions [segments, width, row] on this
/// rank: 0 for slots that have no place there. `convention` as in sharding/distributed.hpp: `split`
/// when all ranks compute the same loss (no communication), `sum` when each computes a part of it
/// (one reduce-scatter). Collective; same errors, and one when the convention differs.
std::vector<float> gather_predictions_backward(const Layout& layout, const PredictionShape& shape,
                                               std::span<const float> d_predictions,
                                               Communicator& cp, GatherGradient convention);

}  // namespace gyre
