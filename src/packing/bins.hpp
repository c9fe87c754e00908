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
// A bin's length is what its stream costs in linear layers; attention costs Σ L(L+1)/2 of its
// items: one item of 100 and ten of 10 both fill C = 100, but have 5050 and 550 visible pairs.
// `balanced` uses no more bins than the better of the decreasing packers, and evens out that cost.
//
// The first four packers and their measures are those of NeMo-RL's sequence packing; here no bin is
// ever empty, and the shuffle takes a seed.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gyre {

/// A bin: indices of its items, in the order of packing.
using Bin = std::vector<int64_t>;

/// The longest of the items that are longer than a limit (the first of equals), and their number.
struct LongestAbove {
  int64_t item, length, count;
  /// " (the longest of 3 that do not fit)", or "" when it is the only one.
  std::string others_text() const;
};
/// Nothing when all lengths are at most `most`.
std::optional<LongestAbove> longest_above(std::span<const int64_t> lengths, int64_t most);

/// What to do with an item that is longer than the capacity.
enum class Oversize {
  reject,   ///< a usage error
  own_bin,  ///< a bin without room for anything but empty items
};

struct BinOptions {
  int64_t capacity = 0;            ///< C, at least 1
  int64_t min_bin_count = 0;       ///< at least so many bins
  int64_t bin_count_multiple = 1;  ///< the number of bins is a multiple of this
  uint64_t seed = 0;               ///< of first_fit_shuffle; the others draw nothing
  int64_t max_items = 0;           ///< of next_fit: most items of a bin; 0: any number
  Oversize oversize = Oversize::reject;
};

// The packers. Common to all: lengths [n] >= 0; every index is in exactly one bin; no bin is empty;
// without items there are no bins; the same arguments give the same bins. After packing the number
// of bins is raised as adjust_bin_count says.
//
// Usage errors: capacity < 1; a negative length, or one above the capacity under Oversize::reject
// (the longest is named); options out of range; max_items for a packer other than next_fit; fewer
// items than bins.

/// Items in order of input; a bin is closed by the first item that does not fit. O(n).
std::vector<Bin> next_fit(std::span<const int64_t> lengths, const BinOptions& options);

/// Items by (length, index), both descending; each goes into the first bin with room. O(n log n),
/// by a tree of free room over the bins.
std::vector<Bin> first_fit_decreasing(std::span<const int64_t> lengths, const BinOptions& options);
/// The O(n · bins) twin that scans the bins one by one.
std::vector<Bin> first_fit_decreasing_reference(std::span<const int64_t> lengths,
                                                const BinOptions& options);

/// First fit of the items in a random order (Fisher-Yates, options.seed). O(n log n).
std::vector<Bin> first_fit_shuffle(std::span<const int64_t> lengths, const BinOptions& options);
/// The O(n · bins) twin.
std::vector<Bin> first_fit_shuffle_reference(std::span<const int64_t> lengths,
                                             const BinOptions& options);

/// Modified first-fit decreasing (after Johnson and Garey, 1985), as NeMo-RL does it. Items are
/// large above C/2, medium above C/3, small above C/6, else tiny, as empty ones are.
///
///     1  one bin for each large item, in descending order
///     2  for each bin, in that order: add the largest medium item that fits
///     3  for each bin, in reverse, that has no medium item: if the two smallest small items fit
///        together, add the smallest, and then the largest small one that still fits
///     4  for each bin, in order: as long as anything fits, add the largest item that does
///     5  the rest, in descending order: into the emptiest of the bins made in this step if it fits
///        there, otherwise into a new one; these bins follow in ascending order of their load
///
/// Equal lengths: the lower index first, except for the second item of step 3 (the higher). Step 5
/// is worst fit and can need more bins than first_fit_decreasing does. O(n log n).
std::vector<Bin> modified_first_fit_decreasing(std::span<const int64_t> lengths,
                                               const BinOptions& options);
/// The O(n · n) twin: the five steps by scans of lists.
std::vector<Bin> modified_first_fit_decreasing_reference(std::span<const int64_t> lengths,
                                                         const BinOptions& options);

/// Packs for equal attention cost. Let T be the number of bins of first_fit_decreasing or of
/// modified_first_fit_decreasing, whichever needs fewer, after adjust_bin_count.
///
///     start    the cheapest, by the largest cost of a bin, of these packings that has T bins, and
///              of a greedy one: longest item first, into the bin of least cost among those with
///              room. When an item finds no room, the greedy packing is tried again with only the
///              longer items (C/256, C/64, C/16, C/4) placed by cost, and the rest by best fit.
///     improve  take the costliest bin and, in turn, the 128 cheapest. Deal the items of the pair
///              anew by the same greedy rule; or else exchange up to two items of one for up to two
///              of the other, among the 24 longest of each. Keep what makes the dearer of the two
///              bins cheaper. A costliest bin that no partner improves is done, and the next has
///              its turn.
///
/// So it has T bins and the same utilisation, and its largest cost is never above that of a
/// decreasing packer with T bins. No packing into T bins is below the cost of the longest item, nor
/// below the mean cost. Measured (bench/packing.cpp): for 4096 documents of the long-tailed
/// distribution of lengths.hpp, cut at C/4 or at C, the largest cost is within 1 % of the larger of
/// the two, for C = 32K, 64K and 128K; for a million, where all bins are full to the last slots,
/// within 20 %. It can stay far above where bins have few items and no room to spare (lengths even
/// up to C/2: 1.45 times). The search does work in proportion to 2^22 + 64 n, so that all takes
/// O(n log n). Lengths and capacity are at most 2^31 - 1.
std::vector<Bin> balanced_bins(std::span<const int64_t> lengths, const BinOptions& options);

/// Raises the number of bins to max(bins, min_bin_count), rounded up to bin_count_multiple. New
/// bins get one item each: the last one of the bin with most items (ties: the higher bin), again
/// and again until one is left there; then of the next in that order. Loads only fall, so that no
/// capacity is exceeded; balance is not looked at. Throws a usage error when there are fewer items
/// than bins. O(bins log bins).
std::vector<Bin> adjust_bin_count(std::vector<Bin> bins, const BinOptions& options);

struct BinPacker {
  std::string name;
  std::string summary;
  std::vector<Bin> (*pack)(std::span<const int64_t> lengths, const BinOptions& options);
};

/// next-fit, first-fit-decreasing, first-fit-shuffle, modified-first-fit-decreasing, balanced.
const std::vector<BinPacker>& bin_packers();

/// The packer of this name, in full; case does not matter, and '_' is as good as '-'. Throws a
/// usage error that lists the names ("mffd" is none of them).
const BinPacker& find_bin_packer(std::string_view name);

/// The options under which bins can be dealt to `ranks` data-parallel ranks: at least so many bins,
/// and a multiple. What `options` ask for besides still holds.
BinOptions options_for_ranks(BinOptions options, int ranks);

/// Bin k goes to rank k mod ranks: [ranks] lists of bins, ascending. Packers that place long items
/// first give rank 0 the heaviest bins; balance_over_groups (packing.hpp) looks at costs instead.
/// Throws a usage error when ranks < 1, or when the number of bins is not a multiple of it.
std::vector<std::vector<int64_t>> assign_bins_to_ranks(int64_t bins, int ranks);

/// How good a packing is. For the linear measures (as in NeMo-RL) an item takes its length rounded
/// up to a multiple; a bin with an oversize item counts as filled by it. All are 0 without bins.
struct BinMeasures {
  int64_t bins = 0;
  int64_t tokens = 0;      ///< Σ lengths
  int64_t padding = 0;     ///< added by rounding the lengths up
  int64_t waste = 0;       ///< bins · C - tokens - padding
  double utilisation = 0;  ///< (tokens + padding) / (bins · C)
  double waste_ratio = 0;  ///< 1 - utilisation
  double efficiency = 0;   ///< ceil((tokens + padding) / C) / bins
  /// 1 - (sample standard deviation of the bins' utilisation) / (their mean); 1 for a single bin;
  /// may be negative.
  double balance = 0;
  std::vector<double> costs;  ///< [bins] Σ L(L+1)/2 of the lengths: visible pairs, causal
  double max_cost = 0;
  double mean_cost = 0;
  double cost_imbalance = 0;  ///< max_cost / mean_cost, 1 at best; 0 when nothing costs anything
};

/// Measures bins of items with these lengths, packed as round_up(length, multiple). Preconditions:
/// indices are valid, capacity and multiple at least 1.
BinMeasures measure_bins(std::span<const Bin> bins, std::span<const int64_t> lengths,
                         int64_t capacity, int64_t multiple = 1);

}  // namespace gyre
