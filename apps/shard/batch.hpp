#pragma once
// Batches of a training framework (gyre/bshd) over context-parallel ranks, in the two formats that
// attention takes.
//
//     thd    one stream of segments, each cut by the layout (packing/cp_batch.hpp)
//     bshd   rows as they are, each cut by dual-chunk-swap, with their key mask (sharding/bshd.hpp)
//
// Rows without tables of lengths are one document each in thd; in bshd their key mask hides the pad
// id at both ends of a row.

#include <string>
#include <vector>

#include "harness/row.hpp"
#include "io/batch_file.hpp"
#include "packing/compatibility.hpp"

namespace gyre {

/// Options of gyre-shard for batches; see --help.
struct BatchOptions {
  std::string format = "thd";
  std::string tail;  ///< "": absorb for cp 1, else own-segment
  std::string pad_positions = "zero";
  int tp = 1;
  int64_t chunks = 1;
};
void declare_batch_options(CLI::App& app, BatchOptions& o);

/// What a batch is sharded for.
struct BatchJob {
  BatchOptions options;
  int cp = 1;
  std::string layout;  ///< of the format thd
  int64_t stripe = 1, chunk = 0;
  AttentionMask mask = AttentionMask::causal_segments;
};

/// One stream (thd), or all rows (bshd), over all context-parallel ranks.
struct BatchResult : MeasuredRow {
  std::string format;
  int64_t stream = 0;
  int64_t slots = 0;                          ///< of a rank
  int64_t least_tokens = 0, most_tokens = 0;  ///< real ones of a rank
  int64_t least_labels = 0, most_labels = 0;  ///< supervised tokens of a rank
  double pair_ratio = 1;                      ///< visible (query, key) pairs, max / mean over ranks
  int64_t hidden_pairs = 0;  ///< pairs with a key of padding that causality leaves visible: the
                             ///< key mask has to hide them
  double mean_loss = 0;      ///< of a stand-in loss, the id of the label: Σ loss / Σ labels
  double mean_of_means = 0;  ///< the same, had each rank divided by its own labels
};
const Table<BatchResult>& batch_table();

/// Shards the rows of `file`, which every rank has, for all ranks of the layout, this rank's share
/// of them, and adds to `checks`: what each rank holds is what the definition of its slots says;
/// boundaries are those of the tables; the mean loss of the shards is that of the batch; with as
/// many ranks as the run has, rows come back over the communicator. Returns a row for each stream.
/// Throws a usage error that names file, row and segment for batches that cannot be sharded, when
/// the ranks' batches differ, and for a mask that sharded attention cannot keep. Collective.
std::vector<BatchResult> shard_batch(const std::string& file, const BshdArrays& arrays,
                                     const BatchJob& job, Communicator& world,
                                     Verification& checks);

/// "causal", "causal-segments", "full" or "dense".
AttentionMask find_mask(const std::string& name);
const std::vector<std::string>& mask_names();

}  // namespace gyre
