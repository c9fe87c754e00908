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

struct Amounts {
  double pairs = 0, tokens = 0, needed = 0;
  Amounts operator+(const Amounts& o) const {
    return {pairs + o.pairs, tokens + o.tokens, needed + o.needed};
  }
};

/// Keys that all members of a group need from each other: member i needs those up to the end of its
/// last chunk, which are (2g - i) / 2g of the document.
double needed_by_group(int64_t length, int64_t size) {
  return 0.75 * length * (size - 1);
}

/// Groups, [documents], and what they are chosen by.
struct Candidate {
  std::vector<std::vector<int32_t>> groups;
  double largest_load = 0;
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
    mean_pairs_ = std::max(1.0, pairs) / cp_;
    const TimeModel& time = options.time;
    if (time.seconds_per_pair > 0)
      pairs_per_needed_ = time.seconds_per_kv_token / time.seconds_per_pair;
  }

  const std::vector<Document>& documents() const { return documents_; }

  Candidate by_power_of_two() const {
    std::vector<int64_t> sizes;
    for (const Document& d : documents_) {
      const auto least = static_cast<uint64_t>(ceil_div(d.length, slots_));
      sizes.push_back(std::min(static_cast<int64_t>(std::bit_ceil(least)), most_ranks(d)));
    }
    return place(sizes);
  }

  Candidate of_any_size() const {
    const int64_t work = std::max<int64_t>(1, std::ssize(documents_) * cp_);
    const int64_t tries = std::clamp<int64_t>(most_work / work, 1, most_shares);
    Candidate best;
    double best_score = HUGE_VAL;
    for (int64_t i = 0; i < tries; ++i) {
      const std::vector<int64_t> sizes = sizes_of(std::exp2(-octaves * i / tries));
      const double keys = needed_weight * needed_of(sizes);
      if (1 + keys >= best_score) break;
      Candidate candidate = place(sizes);
      if (candidate.largest_load + keys >= best_score) continue;
      best_score = candidate.largest_load + keys;
      best = std::move(candidate);
    }
    return best;
  }

 private:
  static constexpr double needed_weight = 0.1;
  static constexpr int64_t most_shares = 80, most_work = int64_t{1} << 28;
  static constexpr double octaves = 20;  // of shares, which are 2^(-1/4) apart if all are tried

  int64_t pairs_up_to(int64_t segment, int64_t queries) const {
    return options_.pairs ? options_.pairs(segment, queries) : queries * (queries + 1) / 2;
  }

  double load_of(const Amounts& a) const {
    const double pairs = std::max(a.pairs, a.needed * pairs_per_needed_) / mean_pairs_;
    return std::max(pairs, a.tokens / slots_);
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
      const double load = load_of({1.0 * d.pairs, 1.0 * d.length, 0});
      const double least = std::ceil(std::min<double>(load / share - rounding, cp_));
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
    Amounts a;
    const auto chunks = chunks_of_member(d.length, size, member);
    for (const TokenRange& chunk : chunks) {
      a.tokens += chunk.length();
      a.pairs += pairs_up_to(d.segment, chunk.end) - pairs_up_to(d.segment, chunk.begin);
    }
    a.needed = chunks[1].end - a.tokens;
    return a;
  }

  Candidate place(const std::vector<int64_t>& sizes) const {
    Candidate candidate;
    std::vector<Amounts> ranks(cp_);
    std::vector<double> after(cp_);
    for (size_t k = 0; k < documents_.size(); ++k) {
      const Document& d = documents_[k];
      const double size = sizes[k];
      const Amounts mean = {d.pairs / size, d.length / size,
                            needed_by_group(d.length, sizes[k]) / size};
      for (int64_t r = 0; r < cp_; ++r) after[r] = load_of(ranks[r] + mean);
      std::vector<int32_t> group =
          consecutive() ? consecutive_ranks(after, sizes[k]) : least_ranks(after, sizes[k]);
      for (int64_t i = 0; i < sizes[k]; ++i)
        ranks[group[i]] = ranks[group[i]] + amounts_of(d, sizes[k], i);
      candidate.groups.push_back(std::move(group));
    }
    for (const Amounts& rank : ranks)
      candidate.largest_load = std::max(candidate.largest_load, load_of(rank));
    return candidate;
  }

  /// The `size` ranks of least load (ties: lower rank), ascending.
  static std::vector<int32_t> least_ranks(const std::vector<double>& loads, int64_t size) {
    std::vector<int32_t> ranks(loads.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    std::nth_element(
        ranks.begin(), ranks.begin() + size - 1, ranks.end(),
        [&](int32_t a, int32_t b) { return loads[a] != loads[b] ? loads[a] < loads[b] : a < b; });
    ranks.resize(size);
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

  /// Ranks [k·size, (k+1)·size) whose largest load is least (ties: lower k).
  static std::vector<int32_t> consecutive_ranks(const std::vector<double>& loads, int64_t size) {
    int64_t best = 0;
    double least = HUGE_VAL;
    for (int64_t begin = 0; begin + size <= std::ssize(loads); begin += size) {
      const double most = *std::max_element(loads.begin() + begin, loads.begin() + begin + size);
      if (most < least) best = begin;
      least = std::min(least, most);
    }
    std::vector<int32_t> ranks(size);
    std::iota(ranks.begin(), ranks.end(), static_cast<int32_t>(best));
    return ranks;
  }

  const LayoutOptions& options_;
  int64_t cp_, slots_;
  std::vector<Document> documents_;  // by descending pairs
  double mean_pairs_ = 0, pairs_per_needed_ = 0, needed_by_all_ = 0;
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
  check_times(options.time);
  const GroupSearch search(bounds, options);
  Candidate chosen = options.groups == LayoutOptions::power_of_two ? search.by_power_of_two()
                                                                   : search.of_any_size();
  DocumentGroups result;
  result.largest_load = chosen.largest_load;
  result.ranks.resize(bounds.segments());
  for (size_t k = 0; k < search.documents().size(); ++k)
    result.ranks[search.documents()[k].segment] = std::move(chosen.groups[k]);
  return result;
}

}  // namespace gyre
