#pragma once
// Batches of a training framework (gyre/bshd) over context-parallel ranks, in the two formats that
// attention takes.
//
//     thd    one stream of segments; the layout cuts each segment (packing/cp_batch.hpp)
//     bshd   rows with a key mask; dual-chunk-swap cuts each row (sharding/bshd.hpp)
//
// Rows without tables of lengths are one document each in thd. In bshd their key mask hides the pad
// id at both ends of a row.

#include <string>
#include <vector>

#include "apps/common/bshd_rows.hpp"
#include "harness/row.hpp"
#include "io/schemas/array_file.hpp"
#include "io/schemas/batch_file.hpp"
#include "packing/compatibility.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// Options of gyre-shard for batches; see --help.
struct BatchOptions {
  std::string format = "thd";
  std::string tail;  ///< "": absorb for cp 1, else own-segment
  std::string pad_positions = "zero";
  int tp = 1;
  int64_t chunks = 1;
};
void declare_batch_options(OptionTable& table, BatchOptions& o);

/// The ranks, layout and mask that a batch is sharded for.
struct BatchJob {
  BatchOptions options;
  int cp = 1;
  std::string layout;  ///< for the format thd
  LayoutOptions layout_options = {};
  AttentionMask mask = AttentionMask::causal_segments;
};

/// One stream (thd) or all rows (bshd), over all context-parallel ranks.
struct BatchResult : MeasuredRow {
  std::string format;
  int64_t stream = 0;
  int64_t slots = 0;                         ///< per rank
  int64_t least_tokens = 0, max_tokens = 0;  ///< real tokens of a rank
  int64_t least_labels = 0, max_labels = 0;  ///< supervised tokens of a rank
  double pair_ratio = 1;                     ///< visible (query, key) pairs, max / mean over ranks
  int64_t hidden_pairs = 0;  ///< causally visible pairs with a padding key, which the key mask
                             ///< has to hide
  double mean_loss = 0;      ///< Σ loss / Σ labels, where the stand-in loss is the label's id
  double mean_of_means = 0;  ///< mean over ranks of each rank's own mean loss
};
const Table<BatchResult>& batch_table();

/// Arrays of gyre/row-shards: the parts that this rank of the run makes, in their order.
struct KeptRows {
  std::vector<int32_t> index;      ///< [parts, slots]
  std::vector<int32_t> key_mask;   ///< [parts, batch, slots]
  std::vector<int64_t> ids;        ///< [parts, batch, slots], or
  std::vector<float> embeddings;   ///< [parts, batch, slots, hidden]
  std::vector<int64_t> labels;     ///< [parts, batch, slots]
  std::vector<int64_t> positions;  ///< [parts, axes, batch, slots]
  int64_t axes = 1;
};

/// The file of all ranks' shards, on rank 0. Collective.
ArrayFile row_shards_of(const KeptRows& kept, const BshdArrays& arrays, const BatchJob& job,
                        Communicator& world);

/// Bytes of the arrays of that file.
double row_shard_bytes(const BshdArrays& arrays, const BatchJob& job);

/// Shards the rows of `file`, which every rank has. Each rank of the run makes the parts of some
/// ranks of the layout. Adds checks to `checks`: each part holds what the definition of its slots
/// says; boundaries are those of the tables; the mean loss of the shards is that of the batch; rows
/// come back over the communicator if the run has as many ranks as the layout. Returns a row per
/// stream. `kept`, if not null, gets the arrays of the format bshd. Throws a usage error if a batch
/// cannot be sharded (names file, row and segment), ranks' batches differ, or sharded attention
/// cannot keep the mask. Collective.
std::vector<BatchResult> shard_batch(const std::string& file, const BshdArrays& arrays,
                                     const BatchJob& job, Communicator& world, Verification& checks,
                                     KeptRows* kept = nullptr);

/// The mask of this name: "causal", "causal-segments", "full" or "dense".
AttentionMask find_mask(const std::string& name);
const std::vector<std::string>& mask_names();

/// The counts of one rank's part of one stream.
struct RankPart {
  int rank = 0;
  int64_t slots = 0, tokens = 0, pairs = 0, hidden_pairs = 0;
  LossSums loss;
};

/// The parts that this rank of the run makes, [streams][parts].
using StreamParts = std::vector<std::vector<RankPart>>;

/// Make and check the parts of this rank of the run. These two functions do not communicate.
StreamParts shard_streams(const BshdArrays& arrays, const BatchJob& job, Communicator& world,
                          Verification& checks);
StreamParts shard_key_masked_rows(const BshdArrays& arrays, const BatchJob& job,
                                  Communicator& world, Verification& checks, KeptRows* kept);
/// Checks that the rows come back from the ranks of the run. Requires cp ranks. Collective.
void check_rows_over_ranks(const BshdArrays& arrays, const BatchJob& job, Communicator& world,
                           Verification& checks);

/// The stand-in loss of a label is its id, so that sums are exact.
LossSums stand_in_loss(const std::vector<int64_t>& labels);

/// The ranks of the layout whose parts this rank of the run makes.
std::vector<int> ranks_of(const Communicator& world, int cp);

}  // namespace gyre
