#pragma once
// The layouts, and their registry. Pictures: one row of 16 slots, cp = 2; the digit is the owner.
//
//     contiguous        0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1    causal work grows with the rank
//     zigzag            0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0    chunks r and 2·cp-1-r of the whole row
//     dual-chunk-swap   0 1 1 0 | 0 0 0 1 1 1 1 1 1 0 0 0  the same, of each segment (4 and 12)
//     striped           0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1    slot t on rank t mod cp
//     striped, 2        0 0 1 1 0 0 1 1 0 0 1 1 0 0 1 1    runs of `stripe` slots
//     balanced          chunks of `chunk` slots, dealt by their cost
//
// Under a causal mask a token meets the tokens before it in its own document. DualChunkSwap gives
// every rank the same such work for every segment that fills its slots, but each segment must lie
// in a multiple of 2·cp slots. The others take any boundaries.

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/option_field.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// How long attention and its communication take, for layouts that weigh them.
struct TimeModel {
  double seconds_per_pair = 1e-9;      ///< a visible (query, key) pair, all heads
  double seconds_per_kv_token = 1e-9;  ///< the keys and values of one token, received
};

/// The largest context-parallel group that layouts are made for.
inline constexpr int most_ranks = 1 << 16;

struct LayoutOptions {
  int cp = 1;
  int64_t stripe = 1;  ///< run of slots of the striped layout
  int64_t chunk = 0;   ///< slots of a chunk of the balanced layouts; 0: see balanced_chunk
  TimeModel time;
  /// Visible pairs of the first so many queries of a document, for layouts that weigh them; none:
  /// under a causal mask, n (n + 1) / 2.
  std::function<int64_t(int64_t document, int64_t queries)> pairs = {};
};

/// Rank r owns slots [r·n, (r+1)·n), n = slots / cp rounded up.
Layout contiguous(const SegmentBounds& bounds, const LayoutOptions& options);

/// Chunks r and 2·cp-1-r of the whole row, which is padded to a multiple of 2·cp. Document masks
/// stay; work is balanced only when one document fills the row.
Layout zigzag(const SegmentBounds& bounds, const LayoutOptions& options);

/// Chunks r and 2·cp-1-r of every segment. Throws a usage error that names the first segment whose
/// slot length is not a multiple of 2·cp (a multiple of cp, or only the total, is not enough), with
/// the nearest valid length.
Layout dual_chunk_swap(const SegmentBounds& bounds, int cp);
Layout dual_chunk_swap(const SegmentBounds& bounds, const LayoutOptions& options);

/// Runs of `stripe` slots dealt round robin; the row is padded to a multiple of stripe·cp.
Layout striped(const SegmentBounds& bounds, const LayoutOptions& options);

/// Chunks of equal size, equally many on each rank, so that the largest number of visible pairs on
/// a rank is small; the row is padded to a multiple of chunk·cp. See balanced.hpp.
Layout balanced(const SegmentBounds& bounds, const LayoutOptions& options);

/// The same chunks, dealt so that the larger of compute and communication time, by options.time,
/// is small on the slowest rank.
Layout balanced_joint(const SegmentBounds& bounds, const LayoutOptions& options);

/// `count` sequences of `length` tokens, which fill the stream.
struct EqualSequences {
  int64_t count = 0;
  int64_t length = 0;
};

/// Slots of equal sequences that one rank owns, by formula.
struct OwnedSlots {
  std::vector<SlotRun> runs;      ///< start, stride and length; past the stream's end is padding
  bool in_each_sequence = false;  ///< runs of the first sequence, repeated in each one
};

/// An entry of the registry. References have no default: a layout without a closed form says so by
/// no_owned_slots and no_needed_share.
struct LayoutKind {
  std::string name;
  std::string summary;
  Layout (&make)(const SegmentBounds& bounds, const LayoutOptions& options);
  /// What `rank` owns of a layout of equal sequences; none where there is no form.
  std::optional<OwnedSlots> (&owned)(const Layout& layout, const EqualSequences& sequences,
                                     int rank);
  /// Share of a ring's bytes that ranks need of each other, for one causal sequence of `length`
  /// tokens which is a multiple of cp > 1; none where there is no form.
  std::optional<double> (&needed_share)(const Layout& layout, int64_t length);
  /// The members of LayoutOptions that `make` reads, but for cp and time.
  std::vector<int64_t LayoutOptions::*> reads = {};
  int chunks_per_rank = 0;  ///< each segment is cut into so many for every rank; 0: no matter
  /// What the slots of every segment must be a multiple of.
  int64_t segment_multiple(int cp) const { return std::max(1, chunks_per_rank * cp); }
};

std::optional<OwnedSlots> no_owned_slots(const Layout& layout, const EqualSequences& sequences,
                                         int rank);
std::optional<double> no_needed_share(const Layout& layout, int64_t length);

/// In the order of layouts/list.hpp, which says how to add one.
const std::vector<LayoutKind>& layout_kinds();
/// The one that list.hpp marks.
const LayoutKind& default_layout();
/// Throws a usage error that lists the names.
const LayoutKind& find_layout(const std::string& name);
/// The entry that made a layout; null when there is none of its name.
const LayoutKind* kind_of(const Layout& layout);

/// The least number of chunks that suits every layout: slots of a segment that are a multiple of it
/// times cp can be cut by each.
int chunks_for_all_layouts();

/// Every member of LayoutOptions that is an option of layouts, by the name under which apps offer
/// it.
const std::vector<OptionField<LayoutOptions>>& layout_option_fields();

}  // namespace gyre
