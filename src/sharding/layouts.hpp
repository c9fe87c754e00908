#pragma once
// Layouts and their registry. Examples: one row of 16 slots, cp = 2; each digit is the owner.
//
//     contiguous            0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1    causal work grows with the rank
//     contiguous-documents  0 0 1 1 | 0 0 0 0 0 0 1 1 1 1 1 1  the same in each segment (4 and 12)
//     zigzag                0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0    chunks r and 2·cp-1-r of the row
//     dual-chunk-swap       0 1 1 0 | 0 0 0 1 1 1 1 1 1 0 0 0  zigzag in each segment
//     striped               0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1    slot t on rank t mod cp
//     striped, 2            0 0 1 1 0 0 1 1 0 0 1 1 0 0 1 1    runs of `stripe` slots
//     balanced              chunks of `chunk` slots, assigned by cost
//     hybrid                dual-chunk-swap over as many ranks as each document needs
//
// Under a causal mask a token attends to the earlier tokens of its document. DualChunkSwap gives
// every rank equal work for every segment that fills its slots, but the slots of each segment must
// be a multiple of 2·cp, and of cp for contiguous-documents. The other layouts accept any
// boundaries.

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/option_field.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// Time of attention and its communication, for layouts that minimise it.
struct TimeModel {
  double seconds_per_pair = 1e-9;      ///< one visible (query, key) pair, all heads
  double seconds_per_kv_token = 1e-9;  ///< receiving the keys and values of one token
};

/// Largest supported context-parallel group.
inline constexpr int max_ranks = 1 << 16;

struct LayoutOptions {
  int cp = 1;
  int64_t stripe = 1;  ///< slots of a run of the striped layout
  int64_t chunk = 0;   ///< slots of a chunk of the balanced layouts; 0: see balanced_chunk
  int64_t groups = 0;  ///< sizes of the groups of hybrid; 0: any; power_of_two: by length
  static constexpr int64_t power_of_two = 1;
  TimeModel time;
  int64_t pairs_per_key = 0;  ///< time of a token over that of a pair; 0: as in `time`
  /// The times by which layouts weigh keys against pairs.
  TimeModel weights() const {
    return pairs_per_key > 0 ? TimeModel{1, static_cast<double>(pairs_per_key)} : time;
  }
  /// Number of visible pairs of the first `queries` queries of a document, for layouts that balance
  /// them. Unset: causal mask, n (n + 1) / 2.
  std::function<int64_t(int64_t document, int64_t queries)> pairs = {};
};

/// Rank r owns slots [r·n, (r+1)·n), n = slots / cp rounded up.
Layout contiguous(const SegmentBounds& bounds, const LayoutOptions& options);

/// Chunks r and 2·cp-1-r of the whole row, padded to a multiple of 2·cp. Document masks stay valid;
/// work is balanced only when one document fills the row.
Layout zigzag(const SegmentBounds& bounds, const LayoutOptions& options);

/// Chunks r and 2·cp-1-r of every segment. Throws a usage error that names the first segment whose
/// slot length is not a multiple of 2·cp (a multiple of cp, or only the total, is not enough), with
/// the nearest valid length.
Layout dual_chunk_swap(const SegmentBounds& bounds, int cp);
Layout dual_chunk_swap(const SegmentBounds& bounds, const LayoutOptions& options);

/// Runs of `stripe` slots in round-robin order; the row is padded to a multiple of stripe·cp.
Layout striped(const SegmentBounds& bounds, const LayoutOptions& options);

/// Chunks of equal size, equally many per rank, assigned so that the maximum over ranks of visible
/// pairs is small; the row is padded to a multiple of chunk·cp. See balanced.hpp.
Layout balanced(const SegmentBounds& bounds, const LayoutOptions& options);

/// The chunks of `balanced`, assigned so that the larger of compute and communication time, by
/// options.weights(), is small on the slowest rank.
Layout balanced_joint(const SegmentBounds& bounds, const LayoutOptions& options);

/// Shares each document among a group of ranks that is chosen for it; groups may overlap. See
/// document_groups.hpp.
Layout hybrid(const SegmentBounds& bounds, const LayoutOptions& options);

/// `count` sequences of `length` tokens each; together they fill the stream.
struct EqualSequences {
  int64_t count = 0;
  int64_t length = 0;
};

/// Closed form of the slots that one rank owns when all sequences are equal.
struct OwnedSlots {
  std::vector<SlotRun> runs;      ///< start, stride, length; slots past the stream are padding
  bool in_each_sequence = false;  ///< the runs are of the first sequence and repeat in each one
};

/// An entry of the registry. The function references have no default: a layout without a closed
/// form uses no_owned_slots and no_needed_share.
struct LayoutKind {
  std::string name;
  std::string summary;
  Layout (&make)(const SegmentBounds& bounds, const LayoutOptions& options);
  /// Slots that `rank` owns in a layout of equal sequences; nullopt without a closed form.
  std::optional<OwnedSlots> (&owned)(const Layout& layout, const EqualSequences& sequences,
                                     int rank);
  /// Needed share of a ring's bytes for one causal sequence of `length` tokens, a multiple of cp >
  /// 1; nullopt without a closed form.
  std::optional<double> (&needed_share)(const Layout& layout, int64_t length);
  /// Members of LayoutOptions that `make` reads, except cp and time.
  std::vector<int64_t LayoutOptions::*> reads = {};
  int chunks_per_rank = 0;  ///< chunks per rank in each segment; 0: segments are not cut
  /// Required divisor of the slots of every segment.
  int64_t segment_multiple(int cp) const { return std::max(1, chunks_per_rank * cp); }
};

/// "2 cp", or "cp": a divisor of slots in words.
std::string multiple_text(int64_t chunks);

std::optional<OwnedSlots> no_owned_slots(const Layout& layout, const EqualSequences& sequences,
                                         int rank);
std::optional<double> no_needed_share(const Layout& layout, int64_t length);

/// Entries in the order of layouts/list.hpp, which explains how to add one.
const std::vector<LayoutKind>& layout_kinds();
/// The default layout, which list.hpp sets.
const LayoutKind& default_layout();
/// The default of recurrent layers among others: under it states pass from rank to rank.
const LayoutKind& default_recurrent_layout();
/// Throws a usage error that lists the names if there is none of this name.
const LayoutKind& find_layout(const std::string& name);
/// The entry of a layout's name; null if there is none.
const LayoutKind* kind_of(const Layout& layout);

/// Least common multiple of the chunks per rank of all layouts. Every layout can cut segments whose
/// slots are a multiple of this number times cp.
int chunks_for_all_layouts();

/// Members of LayoutOptions that are options of layouts, each with its option name in apps.
const std::vector<OptionField<LayoutOptions>>& layout_option_fields();

}  // namespace gyre
