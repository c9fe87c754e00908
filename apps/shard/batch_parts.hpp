#pragma once
// The two formats of gyre-shard's batches: what a rank holds, and what the definitions say.

#include "apps/common/swapped_slot.hpp"
#include "apps/shard/batch.hpp"

namespace gyre {

/// What one rank holds of one stream, as the table counts it.
struct RankPart {
  int rank = 0;
  int64_t slots = 0, tokens = 0, pairs = 0, hidden_pairs = 0;
  LossSums loss;
};

/// The parts of the ranks that this rank of the run makes, [streams][parts].
using StreamParts = std::vector<std::vector<RankPart>>;

/// No communication.
StreamParts shard_streams(const BshdArrays& arrays, const BatchJob& job, Communicator& world,
                          Verification& checks);
StreamParts shard_key_masked_rows(const BshdArrays& arrays, const BatchJob& job,
                                  Communicator& world, Verification& checks);
/// Adds to `checks`: the rows come back from the ranks of the run, of which there are cp.
/// Collective.
void check_rows_over_ranks(const BshdArrays& arrays, const BatchJob& job, Communicator& world,
                           Verification& checks);

/// The stand-in loss of labels: their ids, which sums hold exactly.
LossSums stand_in_loss(const std::vector<int64_t>& labels);

/// The ranks of the layout that this rank of the run takes.
std::vector<int> ranks_of(const Communicator& world, int cp);

}  // namespace gyre
