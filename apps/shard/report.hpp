#pragma once
// What gyre-shard plans and checks: a layout over all bins of packed streams.

#include <map>
#include <string>
#include <vector>

#include "apps/common/prefix_options.hpp"
#include "attention/mask.hpp"
#include "harness/backend.hpp"
#include "harness/row.hpp"
#include "io/shard_file.hpp"
#include "sharding/cost.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// The attention that layouts are planned for, and the machine.
struct AttentionShape {
  int64_t heads = 32, kv_heads = 8, head_dim = 128;
  int64_t element_bytes = 2;
  double tflops = 400;       ///< of one rank, achieved
  double gbytes_per_s = 50;  ///< received by one rank
  double kv_token_bytes() const {
    return 2.0 * static_cast<double>(kv_heads * head_dim * element_bytes);
  }
  TimeModel time_model() const;
};

/// One layout, over all bins. A bin is a step: ranks wait for the slowest of each.
struct ShardingResult : MeasuredRow {
  std::string layout;
  int64_t cp = 1;
  int64_t slots = 0;         ///< of a rank, all bins
  double padding = 0;        ///< share of slots without a real token
  double run_length = 0;     ///< mean length of a run of neighbouring tokens on a rank
  double pair_ratio = 1;     ///< Σ over bins of max pairs / Σ of mean pairs
  double worst_ratio = 1;    ///< of one bin
  double needed = 0;         ///< share of the ring's bytes, mean over ranks
  double needed_most = 0;    ///< the same, of the rank that needs most
  double needed_bytes = 0;   ///< Σ over bins of the rank that needs most in it
  double compute_s = 0;      ///< Σ over bins of the slowest rank's compute
  double communicate_s = 0;  ///< the same for needed keys
  double step_s = 0;         ///< the same for the larger of the two: all overlapped
  double planning_s = 0;     ///< CPU time that making the layouts took, all bins
};
const Table<ShardingResult>& sharding_table();

/// Boundaries of a bin's segments, real and slots.
struct BinBounds {
  std::vector<int32_t> real, padded;
  SegmentBounds view() const { return {real, padded}; }
};

/// A layout for the bins of packed streams. Layouts are made once a bin, when they are asked for.
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
  /// The bin's first slot among those of all bins, as they are packed.
  int64_t first_slot(int64_t bin) const { return slot_offsets_[static_cast<size_t>(bin)]; }
  bool no_slots() const { return slot_offsets_.back() == 0; }
  BinBounds bounds(int64_t bin) const;
  /// Who sees whom in a bin: causal, or as the trees of its documents say.
  MaskRule mask(int64_t bin) const;
  /// Throws a usage error that names bin and segment when the layout refuses.
  const Layout& layout(int64_t bin);
  /// CPU time that making layouts has taken in this process so far.
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

/// The row of a layout, check left open, and the cost of every rank summed over bins. Bins are
/// dealt over the run's ranks. Throws what ShardingPlan::layout throws. Collective.
ShardingResult plan_layout(ShardingPlan& plan, const AttentionShape& shape, Communicator& world,
                           std::vector<RankCost>& rank_costs);

/// A "#" table with a line for each context-parallel rank.
std::string rank_costs_text(const std::string& layout, const std::vector<RankCost>& costs,
                            const AttentionShape& shape);

/// A report whose configuration says what is sharded, and for what.
RunReport begin_sharding_report(const AppContext& context, const PackedHeader& header,
                                const std::string& origin, int cp, const AttentionShape& shape);
/// Adds the row to the results, and its figures of merit.
void add_row(RunReport& report, const ShardingResult& row);
/// A picture of one bin (that is there) under the layout of this name, or all that accept it.
std::string picture_of_bin(const PackedHeader& header, int64_t bin, const std::string& layout,
                           const LayoutOptions& options, bool repad);

/// Adds to `checks`, for the slots of all bins (the same on all ranks): every slot's id (or
/// embedding), label and position comes back from the shards of all ranks, bit for bit; pairs are
/// those of the documents; the keys that ranks need add up. When the run has as many ranks as the
/// layout, shards are also gathered over the communicator, and the
/// sharded ids are shifted to the left, as labels are made. A `backend` on a GPU shards, gathers
/// and shifts there, over its communicator. Collective; every rank ends with the same checks.
void check_layout(ShardingPlan& plan, const PackedSlots& slots, Communicator& world,
                  Verification& checks, Backend* backend = nullptr);

/// The header of a shards file, and the rows that come from this rank; sharded where `backend` is.
ShardsHeader shards_header(ShardingPlan& plan);
std::vector<ShardRows> make_shard_rows(ShardingPlan& plan, const PackedSlots& slots,
                                       Communicator& world, Backend* backend = nullptr);

/// Adds to `checks`: rows read back from `path` restore the packed slots. Collective.
void check_shard_file(ShardingPlan& plan, const PackedSlots& slots, const std::string& path,
                      const ShardsHeader& shards, Communicator& world, Verification& checks);

}  // namespace gyre
