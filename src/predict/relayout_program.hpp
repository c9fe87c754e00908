#pragma once
// Predicts a change of layout (sharding/distributed.hpp) from the moves of all ranks, with the links
// and the engine of attention (program.hpp, simulate.hpp).
//
//     sent rows       spend (packing), send to each peer
//     kept rows       spend, while messages travel
//     received rows   receive, wait, spend (unpacking)

#include <vector>

#include "predict/predict.hpp"
#include "sharding/distributed.hpp"

namespace gyre {

/// Predicts that rows of `row_bytes` bytes move. moves: [ranks of the group]. Messages and bytes are
/// those of the moves.
PassPrediction predict_relayout(const std::vector<SlotMoves>& moves, int64_t row_bytes,
                                const MachineModel& machine, GroupPlace place);

}  // namespace gyre
