#include "sharding/document_groups.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "sharding/layouts/chunks.hpp"

namespace gyre {
namespace {

struct Document {
  int64_t segment, length, pairs;
};

/// Pairs and tokens that a rank has, and keys that it needs from other ranks.
struct Amounts {
  double pairs = 0, tokens = 0, needed = 0;
};

/// Keys that all members of a group need from each other: member i needs those up to the end of its
/// last chunk, which are (2g - i) / 2g of the document.
double needed_by_group(int64_t length, int64_t size) {
  return 0.75 * length * (size - 1);
}

/// The Amounts of all ranks, [cp], as three arrays, so that compilers vectorise loops over ranks.
struct RankAmounts {
  explicit RankAmounts(int64_t cp) : pairs(cp), tokens(cp), needed(cp) {}
  std::vector<double> pairs, tokens, needed;
};

class GroupSearch {
 public:
  GroupSearch(const SegmentBounds& bounds, const LayoutOptions& options)
      : options_(options), cp_(options.cp), slots_(ceil_div(bounds.slots(), options.cp)) {
    double pairs = 0;
    for (int64_t i = 0; i < bounds.segments(); ++i)
      if (const int64_t length = bounds.real_length(i); length > 0) {
        documents_.push_back({i, length, pairs_up_to(i, length)});
        pairs += documents_.back().pairs;
        needed_by_all_ += needed_by_group(length, cp_);
      }
    std::sort(documents_.begin(), documents_.end(), [](const Document& a, const Document& b) {
      if (a.pairs != b.pairs) return a.pairs > b.pairs;
      return a.length != b.length ? a.length > b.length : a.segment < b.segment;
    });
    load_of_pair_ = static_cast<double>(cp_) / std::max(1.0, pairs);
    const TimeModel time = options.weights();
    if (time.seconds_per_pair > 0)
      load_of_needed_ = load_of_pair_ * time.seconds_per_kv_token / time.seconds_per_pair;
    load_of_token_ = 1.0 / static_cast<double>(std::max<int64_t>(1, slots_));
  }

  const std::vector<Document>& documents() const { return documents_; }

  /// Sizes of the groups of the documents.
  std::vector<int64_t> by_power_of_two() const {
    std::vector<int64_t> sizes;
    for (const Document& d : documents_) {
      const auto least = static_cast<uint64_t>(ceil_div(d.length, slots_));
      sizes.push_back(std::min(static_cast<int64_t>(std::bit_ceil(least)), most_ranks(d)));
    }
    return sizes;
  }

  std::vector<int64_t> of_any_size() const {
    const int64_t work = std::max<int64_t>(1, std::ssize(documents_) * cp_);
    const int64_t tries = std::clamp<int64_t>(most_work / work, 1, most_shares);
    double most = 1;  // with this share, each document is on one rank
    for (const Document& d : documents_) most = std::max(most, load_of(whole(d)));
    std::vector<int64_t> best, last;
    double best_score = HUGE_VAL;
    for (auto i = -static_cast<int64_t>(std::ceil(std::log2(most) * tries / octaves)); i < tries;
         ++i) {
      const double share = std::exp2(-octaves * static_cast<double>(i) / tries);
      std::vector<int64_t> sizes = sizes_of(share);
      if (sizes == last) continue;
      last = sizes;
      const double keys = needed_weight * needed_of(sizes);
      if (1 + keys >= best_score) break;
      const double score = place(sizes, best_score - keys) + keys;
      if (score >= best_score) continue;
      best_score = score;
      best = std::move(sizes);
    }
    return best;
  }

  /// Places groups of these sizes, and returns the largest load. Stops at the first load of `limit`
  /// or more, and returns that. Appends the ranks of each group to `groups` unless it is null.
  double place(const std::vector<int64_t>& sizes, double limit = HUGE_VAL,
               std::vector<std::vector<int32_t>>* groups = nullptr) const {
    RankAmounts ranks(cp_);
    double largest = 0;
    std::vector<double> after(cp_);
    std::vector<int32_t> group;
    for (size_t k = 0; k < documents_.size(); ++k) {
      const Document& d = documents_[k];
      const double size = sizes[k];
      set_loads(ranks,
                {d.pairs / size, d.length / size, needed_by_group(d.length, sizes[k]) / size},
                after);
      if (consecutive())
        choose_consecutive(after, sizes[k], group);
      else
        choose_least(after, sizes[k], group);
      largest = std::max(largest, add(d, group, ranks));
      if (largest >= limit) return largest;
      if (groups != nullptr) groups->push_back(group);
    }
    return largest;
  }

 private:
  static constexpr double needed_weight = 0.1;
  static constexpr int64_t most_shares = 80, most_work = int64_t{1} << 28;
  static constexpr double octaves = 20;  // of shares, which are 2^(-1/4) apart if all are tried

  int64_t pairs_up_to(int64_t segment, int64_t queries) const {
    return options_.pairs ? options_.pairs(segment, queries) : queries * (queries + 1) / 2;
  }

  static Amounts whole(const Document& d) { return {1.0 * d.pairs, 1.0 * d.length, 0}; }

  double load_of(const Amounts& a) const {
    const double pairs = std::max(a.pairs * load_of_pair_, a.needed * load_of_needed_);
    return std::max(pairs, a.tokens * load_of_token_);
  }

  /// The load of each rank if it also had `more`.
  void set_loads(const RankAmounts& ranks, const Amounts& more, std::vector<double>& loads) const {
    for (int64_t r = 0; r < cp_; ++r)
      loads[r] = load_of({ranks.pairs[r] + more.pairs, ranks.tokens[r] + more.tokens,
                          ranks.needed[r] + more.needed});
  }

  /// Largest group in which every chunk has a token.
  int64_t most_ranks(const Document& d) const {
    int64_t most = std::max<int64_t>(1, d.length / 2);
    if (most >= cp_) return cp_;
    if (consecutive()) most = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(most)));
    return most;
  }

  bool consecutive() const { return options_.groups == LayoutOptions::power_of_two; }

  std::vector<int64_t> sizes_of(double share) const {
    std::vector<int64_t> sizes;
    for (const Document& d : documents_) {
      constexpr double rounding = 1e-9;
      const double least = std::ceil(std::min<double>(load_of(whole(d)) / share - rounding, cp_));
      sizes.push_back(std::clamp<int64_t>(static_cast<int64_t>(least), 1, most_ranks(d)));
    }
    return sizes;
  }

  /// Keys needed by groups of these sizes, as a share of what groups of all ranks would need.
  double needed_of(const std::vector<int64_t>& sizes) const {
    double needed = 0;
    for (size_t k = 0; k < sizes.size(); ++k)
      needed += needed_by_group(documents_[k].length, sizes[k]);
    return needed / std::max(1.0, needed_by_all_);
  }

  Amounts amounts_of(const Document& d, int64_t size, int64_t member) const {
    if (size == 1) return whole(d);
    Amounts a;
    const auto chunks = chunks_of_member(d.length, size, member);
    for (const TokenRange& chunk : chunks) {
      a.tokens += chunk.length();
      a.pairs += pairs_up_to(d.segment, chunk.end) - pairs_up_to(d.segment, chunk.begin);
    }
    a.needed = chunks[1].end - a.tokens;
    return a;
  }

  /// Adds a document to the ranks of its group, and returns their largest load.
  double add(const Document& d, const std::vector<int32_t>& group, RankAmounts& ranks) const {
    double largest = 0;
    for (int64_t i = 0; i < std::ssize(group); ++i) {
      const Amounts part = amounts_of(d, std::ssize(group), i);
      const int32_t r = group[i];
      ranks.pairs[r] += part.pairs;
      ranks.tokens[r] += part.tokens;
      ranks.needed[r] += part.needed;
      largest = std::max(largest, load_of({ranks.pairs[r], ranks.tokens[r], ranks.needed[r]}));
    }
    return largest;
  }

  /// Sets `ranks` to the `size` ranks of least load (ties: lower rank), ascending.
  static void choose_least(const std::vector<double>& loads, int64_t size,
                           std::vector<int32_t>& ranks) {
    if (size == 1) {
      const auto least = std::min_element(loads.begin(), loads.end());
      ranks.assign(1, static_cast<int32_t>(least - loads.begin()));
      return;
    }
    ranks.resize(loads.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    std::nth_element(
        ranks.begin(), ranks.begin() + size - 1, ranks.end(),
        [&](int32_t a, int32_t b) { return loads[a] != loads[b] ? loads[a] < loads[b] : a < b; });
    ranks.resize(size);
    std::sort(ranks.begin(), ranks.end());
  }

  /// Sets `ranks` to [k·size, (k+1)·size), whose largest load is least (ties: lower k).
  static void choose_consecutive(const std::vector<double>& loads, int64_t size,
                                 std::vector<int32_t>& ranks) {
    int64_t best = 0;
    double least = HUGE_VAL;
    for (int64_t begin = 0; begin + size <= std::ssize(loads); begin += size) {
      const double most = *std::max_element(loads.begin() + begin, loads.begin() + begin + size);
      if (most < least) best = begin;
      least = std::min(least, most);
    }
    ranks.resize(size);
    std::iota(ranks.begin(), ranks.end(), static_cast<int32_t>(best));
  }

  const LayoutOptions& options_;
  int64_t cp_, slots_;
  std::vector<Document> documents_;  // by descending pairs
  double load_of_pair_ = 0, load_of_needed_ = 0, load_of_token_ = 0, needed_by_all_ = 0;
};

}  // namespace

std::array<TokenRange, 2> chunks_of_member(int64_t length, int64_t size, int64_t member) {
  const auto begin_of = [&](int64_t chunk) { return chunk * length / (2 * size); };
  const int64_t last = 2 * size - 1 - member;
  return {{{begin_of(member), begin_of(member + 1)}, {begin_of(last), begin_of(last + 1)}}};
}

DocumentGroups choose_groups(const SegmentBounds& bounds, const LayoutOptions& options) {
  check_cp(options.cp);
  check_bounds(bounds);
  check_times(options.weights());
  const GroupSearch search(bounds, options);
  std::vector<std::vector<int32_t>> groups;
  DocumentGroups result;
  result.largest_load =
      search.place(options.groups == LayoutOptions::power_of_two ? search.by_power_of_two()
                                                                 : search.of_any_size(),
                   HUGE_VAL, &groups);
  result.ranks.resize(bounds.segments());
  for (size_t k = 0; k < groups.size(); ++k)
    result.ranks[search.documents()[k].segment] = std::move(groups[k]);
  return result;
}

}  // namespace gyre
