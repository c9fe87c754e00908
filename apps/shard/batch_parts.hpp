#pragma once
// Parts of gyre-shard's batches in both formats, and checks against their definitions.

#include "apps/common/swapped_slot.hpp"
#include "apps/shard/batch.hpp"

namespace gyre {

/// The counts of one rank's part of one stream.
struct RankPart {
  int rank = 0;
  int64_t slots = 0, tokens = 0, pairs = 0, hidden_pairs = 0;
  LossSums loss;
};

/// The parts that this rank of the run makes, [streams][parts].
using StreamParts = std::vector<std::vector<RankPart>>;

/// These functions do not communicate.
StreamParts shard_streams(const BshdArrays& arrays, const BatchJob& job, Communicator& world,
                          Verification& checks);
StreamParts shard_key_masked_rows(const BshdArrays& arrays, const BatchJob& job,
                                  Communicator& world, Verification& checks);
/// Checks that the rows come back from the ranks of the run. Requires cp ranks. Collective.
void check_rows_over_ranks(const BshdArrays& arrays, const BatchJob& job, Communicator& world,
                           Verification& checks);

/// The stand-in loss of a label is its id, so that sums are exact.
LossSums stand_in_loss(const std::vector<int64_t>& labels);

/// The ranks of the layout whose parts this rank of the run makes.
std::vector<int> ranks_of(const Communicator& world, int cp);

}  // namespace gyre
