#pragma once
// Bin packing: which documents share a packed stream.
//
// Items of given lengths go into bins of one capacity C. Example, C = 8:
//
//     item     0 1 2 3 4 5 6 7
//     length   4 1 3 2 1 3 4 5
//
//     next-fit                        [0 1 2] [3 4 5] [6] [7]   4 bins
//     first-fit-decreasing            [7 5] [6 0] [2 3 4 1]     3 bins
//     modified-first-fit-decreasing   [7 2] [5 3 1 4] [0 6]     3 bins
//
// The length of a bin is the cost of its stream in linear layers. Attention costs Σ L(L+1)/2 over
// its items: one item of 100 and ten of 10 both fill C = 100, but have 5050 and 550 visible pairs.
// `balanced` uses no more bins than the better of the decreasing packers and equalises that cost.
// `hybrid` takes, of the bins of the other packers, those with the shortest step on groups of ranks.
//
// All packers but these two, and the measures, follow NeMo-RL's sequence packing. Unlike there, no
// bin is ever empty, and the shuffle takes a seed.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sharding/layouts.hpp"

namespace gyre {

/// A bin: indices of its items, in the order of packing.
using Bin = std::vector<int64_t>;

/// The longest item above a limit (the first of equals), and the number of items above the limit.
struct LongestAbove {
  int64_t item, length, count;
  /// " (the longest of 3 that do not fit)", or "" when it is the only one.
  std::string others_text() const;
};
/// Finds the longest of the lengths above `most`; nullopt when there are none.
std::optional<LongestAbove> longest_above(std::span<const int64_t> lengths, int64_t most);

/// What to do with an item that is longer than the capacity.
enum class Oversize {
  reject,   ///< a usage error
  own_bin,  ///< gets its own bin, to which only empty items are added
};

struct BinOptions {
  int64_t capacity = 0;            ///< C, at least 1
  int64_t min_bin_count = 0;       ///< smallest number of bins
  int64_t bin_count_multiple = 1;  ///< the number of bins is a multiple of this
  uint64_t seed = 0;               ///< seed of first_fit_shuffle; the other packers are not random
  int64_t max_items = 0;           ///< next_fit: largest number of items of a bin; 0: no limit
  Oversize oversize = Oversize::reject;
  int dp = 1;           ///< groups of ranks to which step_seconds deals the bins
  int cp = 1;           ///< ranks of a group, to which the layout hybrid gives the tokens of a bin
  TimeModel time = {};  ///< times of a pair and of a token's keys on one of these ranks
};

// The packers. Each takes lengths [n] >= 0 and puts every item in exactly one bin. No bin is empty;
// zero items give zero bins; equal arguments give equal bins. Each packer ends with
// adjust_bin_count, which raises the number of bins to what the options require.
//
// Usage errors: capacity < 1; a negative length, or one above the capacity under Oversize::reject
// (the longest is named); options out of range; max_items > 0 for a packer other than next_fit;
// fewer items than bins.

/// Packs items in input order. The first item that does not fit closes the bin. O(n).
std::vector<Bin> next_fit(std::span<const int64_t> lengths, const BinOptions& options);

/// Takes items by (length, index), both descending; each goes into the first bin with room. O(n log
/// n), by a segment tree of free room over the bins.
std::vector<Bin> first_fit_decreasing(std::span<const int64_t> lengths, const BinOptions& options);
/// O(n · bins) reference: scans the bins one by one.
std::vector<Bin> first_fit_decreasing_reference(std::span<const int64_t> lengths,
                                                const BinOptions& options);

/// First fit of the items in random order (Fisher-Yates, options.seed). O(n log n).
std::vector<Bin> first_fit_shuffle(std::span<const int64_t> lengths, const BinOptions& options);
/// O(n · bins) reference of first_fit_shuffle.
std::vector<Bin> first_fit_shuffle_reference(std::span<const int64_t> lengths,
                                             const BinOptions& options);

/// Modified first-fit decreasing (after Johnson and Garey, 1985), as in NeMo-RL. Items are large
/// above C/2, medium above C/3, small above C/6, else tiny; empty items are tiny.
///
///     1  one bin for each large item, in descending order
///     2  for each bin, in that order: add the largest medium item that fits
///     3  for each bin, in reverse, that has no medium item: if the two smallest small items fit
///        together, add the smallest, and then the largest small one that still fits
///     4  for each bin, in order: as long as anything fits, add the largest item that does
///     5  the rest, in descending order: into the emptiest of the bins made in this step if it fits
///        there, otherwise into a new one; these bins follow in ascending order of their load
///
/// Among equal lengths the lower index comes first, except for the second item of step 3 (the
/// higher). Step 5 is worst fit and can need more bins than first_fit_decreasing does. O(n log n).
std::vector<Bin> modified_first_fit_decreasing(std::span<const int64_t> lengths,
                                               const BinOptions& options);
/// O(n²) reference: the five steps by scans of lists.
std::vector<Bin> modified_first_fit_decreasing_reference(std::span<const int64_t> lengths,
                                                         const BinOptions& options);

/// Packs for equal attention cost. Let T be the smaller of the numbers of bins of
/// first_fit_decreasing and modified_first_fit_decreasing, after adjust_bin_count.
///
///     start    candidates: those of the two packings that have T bins, and a greedy one, which
///              places the longest item first into the bin of least cost that has room. If an item
///              finds no room, the packing is repeated: only items of at least C/256, C/64, C/16 or
///              C/4 are then placed by cost, the rest by best fit. The candidate whose largest cost
///              is smallest wins.
///     improve  pair the costliest bin with each of the 128 cheapest. Assign the items of the pair
///              again by the greedy rule, or else exchange up to two items of one for up to two of
///              the other, among the 24 longest of each. Keep a change that lowers the larger cost
///              of the pair. If no partner improves the costliest bin, continue with the next one.
///
/// The result has T bins. Its largest cost is never above that of a decreasing packer with T bins.
/// Lower bounds of the largest cost: the cost of the longest item, and the mean cost. Measured
/// (bench/packing.cpp) for the long-tailed distribution of lengths.hpp, cut at C/4 or at C, with C
/// = 32K, 64K and 128K: for 4096 documents the largest cost is within 1 % of the larger bound; for
/// a million, where all bins are full to the last slots, within 20 %. It can stay far above where
/// bins have few items and no spare room (uniform lengths up to C/2: 1.45 times). The search
/// examines at most about 2^22 + 64 n items, so that the total is O(n log n). Lengths and capacity
/// are at most 2^31 - 1.
std::vector<Bin> balanced_bins(std::span<const int64_t> lengths, const BinOptions& options);

/// The time of attention in a training step under the layout hybrid (sharding/layouts.hpp), in
/// seconds. `dp` groups of `cp` ranks attend to one bin after the other; balance_over_groups
/// (packing.hpp) deals the bins to them. A bin takes as long as the rank of its group that is
/// slowest to compute causal pairs or to receive keys; the step takes as long as the slowest group.
/// Preconditions: valid indices; bins of at most 2^31 - 1 tokens.
double step_seconds(std::span<const Bin> bins, std::span<const int64_t> lengths,
                    const BinOptions& options);

/// Packs by every other packer, and returns the bins of least step_seconds (ties: fewer bins, then
/// the first packer). Where receiving is fast, all packers are about as good, because a group of
/// ranks evens out any bin. Where it is slow, documents of about the same length belong together,
/// each on few ranks, as the decreasing packers put them; but such bins differ in time, and few of
/// them cannot be dealt evenly to several groups. Lengths and capacity are at most 2^31 - 1.
std::vector<Bin> hybrid_bins(std::span<const int64_t> lengths, const BinOptions& options);

/// Raises the number of bins to max(bins, min_bin_count), rounded up to bin_count_multiple. Each
/// new bin gets one item: the last item of the bin with the most items (ties: the higher bin) until
/// that bin has one item left; then the next bin in that order gives. Loads only fall, so no bin
/// exceeds the capacity. Balance is not considered. Throws a usage error when there are fewer items
/// than bins. O(bins log bins).
std::vector<Bin> adjust_bin_count(std::vector<Bin> bins, const BinOptions& options);

struct BinPacker {
  std::string name;
  std::string summary;
  std::vector<Bin> (*pack)(std::span<const int64_t> lengths, const BinOptions& options);
  bool by_step = false;  ///< packs for the least step_seconds, by BinOptions' cp, dp and time
};

/// The packers above without the references, in this order.
const std::vector<BinPacker>& bin_packers();

/// Finds a packer by its full name; case does not matter and '_' equals '-'. Throws a usage error
/// that lists the names (abbreviations such as "mffd" are unknown).
const BinPacker& find_bin_packer(std::string_view name);

/// Returns `options` for `ranks` data-parallel ranks (dp), which also ask for at least `ranks` bins,
/// in a multiple of `ranks`, so that bins can be dealt to them evenly. Requirements in `options`
/// still hold.
BinOptions options_for_ranks(BinOptions options, int ranks);

/// Assigns bin k to rank k mod ranks. Returns [ranks] ascending lists of bins. If the packer places
/// long items first, rank 0 gets the heaviest bins; balance_over_groups (packing.hpp) assigns by
/// cost instead. Throws a usage error when ranks < 1 or does not divide the number of bins.
std::vector<std::vector<int64_t>> assign_bins_to_ranks(int64_t bins, int ranks);

/// Quality of a packing. The linear measures (as in NeMo-RL) round each length up to a multiple,
/// and take the load of a bin with an oversize item as its capacity. All are 0 without bins.
struct BinMeasures {
  int64_t bins = 0;
  int64_t tokens = 0;      ///< Σ lengths
  int64_t padding = 0;     ///< added by rounding the lengths up
  int64_t waste = 0;       ///< bins · C - tokens - padding
  double utilisation = 0;  ///< (tokens + padding) / (bins · C)
  double waste_ratio = 0;  ///< 1 - utilisation
  double efficiency = 0;   ///< ceil((tokens + padding) / C) / bins
  /// 1 - (sample standard deviation of the bins' utilisation) / (mean of the bins' utilisation); 1
  /// for a single bin; may be negative.
  double balance = 0;
  std::vector<double> costs;  ///< [bins] causally visible pairs, Σ L(L+1)/2
  double max_cost = 0;
  double mean_cost = 0;
  double cost_imbalance = 0;  ///< max_cost / mean_cost, at least 1; 0 when all costs are 0
};

/// Measures bins of items with these lengths; each item takes round_up(length, multiple).
/// Preconditions: valid indices; capacity and multiple at least 1.
BinMeasures measure_bins(std::span<const Bin> bins, std::span<const int64_t> lengths,
                         int64_t capacity, int64_t multiple = 1);

}  // namespace gyre
