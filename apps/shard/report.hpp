#pragma once
// Plans and checks one layout over all bins of packed streams.

#include <map>
#include <string>
#include <vector>

#include "apps/common/attention_shape.hpp"
#include "apps/common/registry_options.hpp"
#include "apps/common/workload_options.hpp"
#include "attention/mask.hpp"
#include "harness/backend.hpp"
#include "harness/row.hpp"
#include "io/schemas/shard_file.hpp"
#include "sharding/cost.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// One layout over all bins. Each bin is a step: all ranks wait for the slowest one.
struct ShardingResult : MeasuredRow {
  std::string layout;
  int64_t cp = 1;
  int64_t slots = 0;         ///< per rank, all bins
  double padding = 0;        ///< share of slots without a real token
  double run_length = 0;     ///< mean length of a run of neighbouring tokens on a rank
  double pair_ratio = 1;     ///< Σ over bins of max pairs / Σ of mean pairs
  double worst_ratio = 1;    ///< max / mean pairs of the worst bin
  double needed = 0;         ///< needed keys over those that a ring sends, mean over ranks
  double needed_most = 0;    ///< the same for the rank that needs most
  double needed_bytes = 0;   ///< Σ over bins of the most bytes that one rank needs
  double compute_s = 0;      ///< Σ over bins of the slowest rank's compute
  double communicate_s = 0;  ///< Σ over bins of the slowest rank's receiving of keys
  double step_s = 0;         ///< Σ over bins of the larger of these two: full overlap
  double planning_s = 0;     ///< CPU time for making the layouts, all bins
};
const Table<ShardingResult>& sharding_table();

/// Boundaries of a bin's segments, in real tokens and in slots.
struct BinBounds {
  std::vector<int32_t> real, padded;
  SegmentBounds view() const { return {real, padded}; }
};

/// Layouts of one kind for all bins of packed streams. Each layout is made once, on first use.
class ShardingPlan {
 public:
  ShardingPlan(const PackedHeader& header, const LayoutKind& kind, const LayoutOptions& options,
               bool repad)
      : header_(header),
        kind_(kind),
        options_(options),
        repad_(repad),
        forest_(forest_of(header.bins.prefixes)),
        slot_offsets_(header.slot_offsets()) {}
  const PackedHeader& header() const { return header_; }
  const LayoutKind& kind() const { return kind_; }
  int cp() const { return options_.cp; }
  /// Index of the bin's first slot among the packed slots of all bins.
  int64_t first_slot(int64_t bin) const { return slot_offsets_[bin]; }
  bool no_slots() const { return slot_offsets_.back() == 0; }
  BinBounds bounds(int64_t bin) const;
  /// The mask of a bin: causal, or that of its documents' trees.
  MaskRule mask(int64_t bin) const;
  /// Throws a usage error that names bin and segment if the layout refuses them.
  const Layout& layout(int64_t bin);
  /// CPU time for making layouts in this process so far.
  double seconds() const { return seconds_; }

 private:
  const PackedHeader& header_;
  const LayoutKind& kind_;
  LayoutOptions options_;
  bool repad_;
  PrefixForest forest_;
  std::vector<int64_t> slot_offsets_;
  std::map<int64_t, Layout> layouts_;
  double seconds_ = 0;
};

/// The row of a layout, without its check, and the cost of every rank summed over bins. Bins are
/// distributed over the run's ranks. Throws what ShardingPlan::layout throws. Collective.
ShardingResult plan_layout(ShardingPlan& plan, const AttentionShape& shape, Communicator& world,
                           std::vector<RankCost>& rank_costs);

/// A "#" table with a line for each context-parallel rank.
std::string rank_costs_text(const std::string& layout, const std::vector<RankCost>& costs,
                            const AttentionShape& shape);

/// A report whose configuration describes the streams and the attention.
RunReport begin_sharding_report(const AppContext& context, const PackedHeader& header,
                                const std::string& origin, const AttentionShape& shape);
/// Adds the row and its figures of merit.
void add_row(RunReport& report, const ShardingResult& row);
/// A picture of one existing bin under the chosen layout, or, of several, those that accept it.
std::string picture_of_bin(const PackedHeader& header, int64_t bin, const LayoutChoice& layout,
                           const LayoutOptions& options, bool repad);

/// Adds checks to `checks` for the slots of all bins (equal on all ranks): the shards of all ranks
/// restore every slot's id (or embedding), label and position bit for bit; pairs are those of the
/// documents; the keys that ranks need add up. If the run has as many ranks as the layout, shards
/// are also gathered over the communicator, and sharded ids are shifted to the left, as for labels.
/// A `backend` on a GPU does this there, over its communicator. Collective; every rank ends with
/// the same checks.
void check_layout(ShardingPlan& plan, const PackedSlots& slots, Communicator& world,
                  Verification& checks, Backend* backend = nullptr);

/// The header of a shards file, and this rank's rows of it, sharded on the device of `backend`.
ShardsHeader shards_header(ShardingPlan& plan);
std::vector<ShardRows> make_shard_rows(ShardingPlan& plan, const PackedSlots& slots,
                                       Communicator& world, Backend* backend = nullptr);

/// Checks that the rows read back from `path` restore the packed slots. Collective.
void check_shard_file(ShardingPlan& plan, const PackedSlots& slots, const std::string& path,
                      const ShardsHeader& shards, Communicator& world, Verification& checks);

/// Compares the file of another program at `path` with this rank's rows: every element of every
/// array. Throws a usage error if its header is another one. Collective.
void check_your_shards(std::span<const ShardRows> mine, const std::string& path,
                       const ShardsHeader& shards, Communicator& world, Verification& checks);

/// Moves the ranks' shards from the layout of one plan to that of the other, and back, as gradients
/// go. Checks the rows against both layouts, and the bytes sent against the rows that change rank.
/// Returns a "#" line with the bytes that all ranks sent. Throws a usage error unless the run has
/// as many ranks as the layouts, or if the second layout refuses a bin. Collective.
std::string check_relayout(ShardingPlan& from, ShardingPlan& to, Communicator& world,
                           Verification& checks);

/// Adds checks to `checks`, for every bin and the convention of this name ("split", "sum", "none",
/// or "all"). A rank's gradient is that of its own slots (split), the sum of all ranks' gradients
/// at its slots (sum), or zero (none). It is zero at padding of the layout. Returns a "#" line per
/// convention with the bytes that all ranks sent. Throws a usage error unless the run has as many
/// ranks as the layout. Collective.
std::string check_gather_gradients(ShardingPlan& plan, const std::string& convention,
                                   Communicator& world, Verification& checks);

}  // namespace gyre
