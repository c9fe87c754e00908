#include "sharding/balanced.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <random>

#include "core/error.hpp"
#include "runtime/clock.hpp"

namespace gyre {
namespace {

/// Visible pairs of the first n queries of a document.
int64_t causal_triangle(int64_t n) {
  return n * (n + 1) / 2;
}

/// A row of `count` chunks, equally many for each rank.
struct Cut {
  int64_t chunk;
  int64_t count;
};

Cut cut_row(const SegmentBounds& bounds, const LayoutOptions& options) {
  if (options.cp < 1) throw_usage("cp must be at least 1, not {}", options.cp);
  if (options.cp > most_ranks) throw_usage("cp must be at most {}, not {}", most_ranks, options.cp);
  check_bounds(bounds);
  constexpr int64_t longest = std::numeric_limits<int32_t>::max();
  if (options.chunk < 0 || options.chunk > longest)
    throw_usage("the chunk must be 1 to {} slots, or 0 for a choice by the row, not {}", longest,
                options.chunk);
  const int64_t chunk =
      options.chunk == 0 ? balanced_chunk(bounds.slots(), options.cp) : options.chunk;
  const int64_t count = round_up(ceil_div(bounds.slots(), chunk), options.cp);
  if (count * chunk > longest)
    throw_usage("{} chunks of {} slots for {} ranks exceed the int32 range of index lists", count,
                chunk, options.cp);
  return {chunk, count};
}

/// Chunks by descending cost; among equals the lower one first.
std::vector<int32_t> by_descending_cost(const std::vector<int64_t>& costs) {
  std::vector<int32_t> order(costs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return costs[static_cast<size_t>(a)] > costs[static_cast<size_t>(b)];
  });
  return order;
}

/// Costs of all chunks of a cut: those past the end of the row are 0.
std::vector<int64_t> costs_of(const SegmentBounds& bounds, const Cut& cut) {
  std::vector<int64_t> costs = chunk_pairs(bounds, cut.chunk);
  costs.resize(static_cast<size_t>(cut.count), 0);
  return costs;
}

/// What the joint search knows of the chunks. Only documents that reach over several chunks can
/// make a rank need foreign keys; a chunk holds parts of at most two of them, at its ends.
struct Chunks {
  struct Document {
    int64_t begin, length;
    int32_t first_chunk;
  };
  static constexpr int32_t none = -1;

  int64_t chunk;
  std::vector<Document> documents;               ///< that reach over several chunks
  std::vector<int64_t> pairs;                    ///< [n]
  std::vector<int64_t> tokens;                   ///< [n] of such documents
  std::vector<std::array<int32_t, 2>> parts_of;  ///< [n] such documents, or none

  int32_t count() const { return static_cast<int32_t>(pairs.size()); }
  const std::array<int32_t, 2>& parts(int32_t c) const { return parts_of[static_cast<size_t>(c)]; }
  /// Keys of `document` up to the end of chunk `c`; 0 for no chunk.
  int64_t keys_up_to(int32_t document, int32_t c) const {
    const Document& d = documents[static_cast<size_t>(document)];
    return c == none ? 0 : std::min(d.length, (c + 1) * chunk - d.begin);
  }
};

Chunks chunks_of(const SegmentBounds& bounds, const Cut& cut) {
  const auto n = static_cast<size_t>(cut.count);
  Chunks chunks{cut.chunk, {}, costs_of(bounds, cut), std::vector<int64_t>(n, 0), {}};
  chunks.parts_of.assign(n, {Chunks::none, Chunks::none});
  for (int64_t i = 0; i < bounds.segments(); ++i) {
    const int64_t begin = bounds.begin(i), end = begin + bounds.real_length(i);
    const int64_t first = begin / cut.chunk, last = (end - 1) / cut.chunk;
    if (end == begin || first == last) continue;
    const auto document = static_cast<int32_t>(chunks.documents.size());
    chunks.documents.push_back({begin, end - begin, static_cast<int32_t>(first)});
    for (int64_t c = first; c <= last; ++c) {
      std::array<int32_t, 2>& parts = chunks.parts_of[static_cast<size_t>(c)];
      (parts[0] == Chunks::none ? parts[0] : parts[1]) = document;
      chunks.tokens[static_cast<size_t>(c)] +=
          std::min(end, (c + 1) * cut.chunk) - std::max(begin, c * cut.chunk);
    }
  }
  return chunks;
}

/// Which rank holds which chunk, and what that costs every rank, kept up to date.
class Deal {
 public:
  Deal(const Chunks& chunks, int cp, const TimeModel& time)
      : chunks_(&chunks),
        time_(time),
        rank_of_(chunks.pairs.size(), -1),
        place_of_(chunks.pairs.size(), 0),
        held_(static_cast<size_t>(cp)),
        pairs_(static_cast<size_t>(cp), 0),
        needed_(static_cast<size_t>(cp), 0),
        last_(static_cast<size_t>(cp) * chunks.documents.size(), Chunks::none) {}
  Deal(const Chunks& chunks, int cp, const TimeModel& time, const std::vector<int32_t>& rank_of)
      : Deal(chunks, cp, time) {
    for (int32_t c = 0; c < chunks.count(); ++c) add(c, rank_of[static_cast<size_t>(c)]);
  }

  int cp() const { return static_cast<int>(held_.size()); }
  const std::vector<int32_t>& rank_of_chunk() const { return rank_of_; }
  int32_t rank_of(int32_t c) const { return rank_of_[static_cast<size_t>(c)]; }
  const std::vector<int32_t>& held(int32_t r) const { return held_[static_cast<size_t>(r)]; }
  int64_t pairs(int32_t r) const { return pairs_[static_cast<size_t>(r)]; }
  int64_t needed(int32_t r) const { return needed_[static_cast<size_t>(r)]; }
  double seconds(int64_t pairs, int64_t needed) const {
    return std::max(static_cast<double>(pairs) * time_.seconds_per_pair,
                    static_cast<double>(needed) * time_.seconds_per_kv_token);
  }
  double slowest_seconds() const {
    double slowest = 0;
    for (int32_t r = 0; r < cp(); ++r) slowest = std::max(slowest, seconds(pairs(r), needed(r)));
    return slowest;
  }
  int64_t all_needed() const { return std::accumulate(needed_.begin(), needed_.end(), int64_t{0}); }

  /// Keys that `rank` needs more, or fewer, when it gives chunk `out` away and gets `in` (either
  /// may be none).
  int64_t needed_change(int32_t rank, int32_t out, int32_t in) const {
    int64_t change = tokens(out) - tokens(in);
    for_each_document(out, in, [&](int32_t document) {
      change += chunks_->keys_up_to(document, last_after(rank, document, out, in)) -
                chunks_->keys_up_to(document, last(rank, document));
    });
    return change;
  }

  void add(int32_t c, int32_t rank) {
    exchange(rank, Chunks::none, c);
    place_of_[static_cast<size_t>(c)] = std::ssize(held(rank));
    held_[static_cast<size_t>(rank)].push_back(c);
    rank_of_[static_cast<size_t>(c)] = rank;
  }

  /// Swaps the ranks of chunks x and y.
  void swap(int32_t x, int32_t y) {
    exchange(rank_of(x), x, y);
    exchange(rank_of(y), y, x);
    std::swap(held_place(x), held_place(y));
    std::swap(place_of_[static_cast<size_t>(x)], place_of_[static_cast<size_t>(y)]);
    std::swap(rank_of_[static_cast<size_t>(x)], rank_of_[static_cast<size_t>(y)]);
  }

 private:
  int64_t tokens(int32_t c) const {
    return c == Chunks::none ? 0 : chunks_->tokens[static_cast<size_t>(c)];
  }
  int64_t chunk_pairs_of(int32_t c) const {
    return c == Chunks::none ? 0 : chunks_->pairs[static_cast<size_t>(c)];
  }
  int32_t& held_place(int32_t c) {
    return held_[static_cast<size_t>(rank_of(c))]
                [static_cast<size_t>(place_of_[static_cast<size_t>(c)])];
  }
  size_t last_index(int32_t rank, int32_t document) const {
    return static_cast<size_t>(rank) * chunks_->documents.size() + static_cast<size_t>(document);
  }
  /// The last chunk of a document on a rank.
  int32_t last(int32_t rank, int32_t document) const { return last_[last_index(rank, document)]; }

  bool holds_part(int32_t c, int32_t document) const {
    return c != Chunks::none &&
           (chunks_->parts(c)[0] == document || chunks_->parts(c)[1] == document);
  }

  int32_t last_after(int32_t rank, int32_t document, int32_t out, int32_t in) const {
    int32_t result = last(rank, document);
    if (result == out && out != Chunks::none) {
      const int32_t first = chunks_->documents[static_cast<size_t>(document)].first_chunk;
      do --result;
      while (result >= first && rank_of(result) != rank);
      if (result < first) result = Chunks::none;
    }
    return holds_part(in, document) ? std::max(result, in) : result;
  }

  /// Visits each document of which chunk `a` or `b` holds a part once.
  template <class Visit>
  void for_each_document(int32_t a, int32_t b, Visit visit) const {
    if (a != Chunks::none)
      for (const int32_t document : chunks_->parts(a))
        if (document != Chunks::none) visit(document);
    if (b != Chunks::none)
      for (const int32_t document : chunks_->parts(b))
        if (document != Chunks::none && !holds_part(a, document)) visit(document);
  }

  /// Books the costs of `rank` giving `out` away and getting `in`.
  void exchange(int32_t rank, int32_t out, int32_t in) {
    needed_[static_cast<size_t>(rank)] += needed_change(rank, out, in);
    pairs_[static_cast<size_t>(rank)] += chunk_pairs_of(in) - chunk_pairs_of(out);
    for_each_document(out, in, [&](int32_t document) {
      last_[last_index(rank, document)] = last_after(rank, document, out, in);
    });
  }

  const Chunks* chunks_;
  TimeModel time_;
  std::vector<int32_t> rank_of_;            // [n]
  std::vector<int64_t> place_of_;           // [n] where the chunk stands in its rank's list
  std::vector<std::vector<int32_t>> held_;  // [cp][m]
  std::vector<int64_t> pairs_, needed_;     // [cp]
  std::vector<int32_t> last_;               // [cp, documents]
};

/// Deals chunks by descending cost, each to the rank that is fastest with it (ties: that needs the
/// fewest keys, lower rank). Chunks of a document come last part first, and so join the ranks that
/// already need the parts before.
Deal deal_by_objective(const Chunks& chunks, int cp, const TimeModel& time) {
  Deal deal(chunks, cp, time);
  const int64_t most = chunks.count() / cp;
  for (const int32_t c : by_descending_cost(chunks.pairs)) {
    int32_t best = -1;
    double best_seconds = 0;
    int64_t best_needed = 0;
    for (int32_t r = 0; r < cp; ++r) {
      if (std::ssize(deal.held(r)) == most) continue;
      const int64_t needed = deal.needed(r) + deal.needed_change(r, Chunks::none, c);
      const double seconds =
          deal.seconds(deal.pairs(r) + chunks.pairs[static_cast<size_t>(c)], needed);
      if (best < 0 || seconds < best_seconds || (seconds == best_seconds && needed < best_needed)) {
        best = r;
        best_seconds = seconds;
        best_needed = needed;
      }
    }
    deal.add(c, best);
  }
  return deal;
}

/// What the search weighs against each other.
struct Scale {
  double seconds;          ///< the order of the best objective
  double needed;           ///< keys that all ranks need under the deal by compute
  double slowest_allowed;  ///< objective of the best start
};

/// Lower is better; infinite when slower than the best start.
double score(const Deal& deal, const Scale& scale) {
  const double seconds = deal.slowest_seconds();
  if (seconds > scale.slowest_allowed) return HUGE_VAL;
  return seconds / scale.seconds + 0.01 * static_cast<double>(deal.all_needed()) / scale.needed;
}

/// A rank's part of the sum that the search lowers. `slowest`: seconds that count 1, those of the
/// slowest rank, so that a threshold means the same in every case.
double energy(const Deal& deal, const Scale& scale, double slowest, int64_t pairs, int64_t needed) {
  double power = deal.seconds(pairs, needed) / slowest;
  for (int i = 0; i < 6; ++i) power *= power;
  return power + 0.1 * static_cast<double>(needed) * deal.cp() / scale.needed;
}

/// Random chunks and neighbours; see balanced.hpp.
class Proposals {
 public:
  std::pair<int32_t, int32_t> next(const Deal& deal) {
    const auto n = static_cast<int32_t>(deal.rank_of_chunk().size());
    const int32_t x = below(n);
    if (below(5) == 0) return {x, below(n)};
    const int32_t neighbour = std::clamp(below(2) == 0 ? x - 1 : x + 1, 0, n - 1);
    const std::vector<int32_t>& held = deal.held(deal.rank_of(neighbour));
    return {x, held[static_cast<size_t>(below(static_cast<int32_t>(held.size())))]};
  }

 private:
  int32_t below(int32_t n) {
    return static_cast<int32_t>(((random_() >> 32) * static_cast<uint64_t>(n)) >> 32);
  }
  std::mt19937_64 random_{1};
};

/// The best deal seen on the way, by score.
struct Best {
  double score = HUGE_VAL;
  std::vector<int32_t> rank_of_chunk;
  void offer(const Deal& deal, const Scale& scale) {
    const double offered = gyre::score(deal, scale);
    if (offered >= score) return;
    score = offered;
    rank_of_chunk = deal.rank_of_chunk();
  }
};

void anneal(Deal deal, const Chunks& chunks, const Scale& scale, Best& best) {
  constexpr double hot = 0.05, cold = 0.0005;
  constexpr int64_t moves_per_chunk = 400, most_moves = 2'000'000, block = 1024;
  const int64_t moves = std::min(moves_per_chunk * chunks.count(), most_moves);
  const double cooling =
      std::pow(cold / hot, static_cast<double>(block) / static_cast<double>(moves));
  Proposals proposals;
  double threshold = hot, slowest = deal.slowest_seconds();
  if (slowest == 0) slowest = scale.seconds;
  for (int64_t i = 0; i < moves; ++i) {
    if (i % block == block - 1) {
      threshold *= cooling;
      if (const double now = deal.slowest_seconds(); now > 0) slowest = std::min(slowest, now);
    }
    const auto [x, y] = proposals.next(deal);
    const int32_t a = deal.rank_of(x), b = deal.rank_of(y);
    if (a == b) continue;
    const int64_t pairs =
        chunks.pairs[static_cast<size_t>(y)] - chunks.pairs[static_cast<size_t>(x)];
    const double change = energy(deal, scale, slowest, deal.pairs(a) + pairs,
                                 deal.needed(a) + deal.needed_change(a, x, y)) +
                          energy(deal, scale, slowest, deal.pairs(b) - pairs,
                                 deal.needed(b) + deal.needed_change(b, y, x)) -
                          energy(deal, scale, slowest, deal.pairs(a), deal.needed(a)) -
                          energy(deal, scale, slowest, deal.pairs(b), deal.needed(b));
    if (!(change < threshold)) continue;
    deal.swap(x, y);
    if (change < 0) best.offer(deal, scale);
  }
}

std::vector<int32_t> search_joint(const Chunks& chunks, int cp, const TimeModel& time) {
  const int64_t per_rank = chunks.count() / cp;
  std::vector<int32_t> in_stream_order(chunks.pairs.size());
  for (size_t c = 0; c < in_stream_order.size(); ++c)
    in_stream_order[c] = static_cast<int32_t>(static_cast<int64_t>(c) / per_rank);
  const std::vector<Deal> starts = {
      Deal(chunks, cp, time, deal_equal_counts(chunks.pairs, cp)),
      Deal(chunks, cp, time, in_stream_order),
      deal_by_objective(chunks, cp, time),
  };
  Scale scale{0, std::max(1.0, static_cast<double>(starts[0].all_needed())), HUGE_VAL};
  for (const Deal& start : starts)
    scale.slowest_allowed = std::min(scale.slowest_allowed, start.slowest_seconds());
  const int64_t pairs = std::accumulate(chunks.pairs.begin(), chunks.pairs.end(), int64_t{0});
  scale.seconds = std::max(static_cast<double>(pairs) * time.seconds_per_pair / cp,
                           0.5 * scale.slowest_allowed);
  // Nothing takes time in the best start: only needed tokens are left to weigh.
  if (scale.seconds == 0) scale.seconds = 1;
  Best best;
  for (const Deal& start : starts) best.offer(start, scale);
  if (cp > 1 && per_rank > 1)
    for (const Deal& start : starts) anneal(start, chunks, scale, best);
  return best.rank_of_chunk;
}

}  // namespace

int64_t balanced_chunk(int64_t slots, int cp) {
  int64_t chunk = 512;
  while (chunk > 1 && chunk * 16 * cp > slots) chunk /= 2;
  return chunk;
}

std::vector<int64_t> chunk_pairs(const SegmentBounds& bounds, int64_t chunk) {
  std::vector<int64_t> pairs(static_cast<size_t>(ceil_div(bounds.slots(), chunk)), 0);
  for (int64_t i = 0; i < bounds.segments(); ++i) {
    const int64_t begin = bounds.begin(i), end = begin + bounds.real_length(i);
    for (int64_t from = begin; from < end;) {
      const int64_t c = from / chunk, to = std::min(end, (c + 1) * chunk);
      pairs[static_cast<size_t>(c)] += causal_triangle(to - begin) - causal_triangle(from - begin);
      from = to;
    }
  }
  return pairs;
}

std::vector<int32_t> deal_equal_counts(const std::vector<int64_t>& costs, int cp) {
  GYRE_CHECK(std::ssize(costs) % cp == 0, "{} chunks for {} ranks", costs.size(), cp);
  const int64_t most = std::ssize(costs) / cp;
  using Load = std::pair<int64_t, int32_t>;  // cost so far, rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> open;
  for (int32_t r = 0; r < cp; ++r) open.emplace(0, r);
  std::vector<int64_t> held(static_cast<size_t>(cp), 0);
  std::vector<int32_t> rank_of(costs.size());
  for (const int32_t c : by_descending_cost(costs)) {
    const auto [load, rank] = open.top();
    open.pop();
    rank_of[static_cast<size_t>(c)] = rank;
    if (++held[static_cast<size_t>(rank)] < most)
      open.emplace(load + costs[static_cast<size_t>(c)], rank);
  }
  return rank_of;
}

std::vector<int32_t> deal_equal_counts_reference(const std::vector<int64_t>& costs, int cp) {
  const size_t ranks = static_cast<size_t>(cp), most = costs.size() / ranks;
  std::vector<int64_t> load(ranks, 0);
  std::vector<size_t> held(ranks, 0);
  std::vector<int32_t> rank_of(costs.size(), -1);
  for (size_t k = 0; k < costs.size(); ++k) {
    size_t heaviest = costs.size();
    for (size_t c = 0; c < costs.size(); ++c)
      if (rank_of[c] < 0 && (heaviest == costs.size() || costs[c] > costs[heaviest])) heaviest = c;
    size_t lightest = ranks;
    for (size_t r = 0; r < ranks; ++r)
      if (held[r] < most && (lightest == ranks || load[r] < load[lightest])) lightest = r;
    rank_of[heaviest] = static_cast<int32_t>(lightest);
    load[lightest] += costs[heaviest];
    ++held[lightest];
  }
  return rank_of;
}

BalanceSearch balance_compute(const SegmentBounds& bounds, const LayoutOptions& options) {
  const double start = thread_cpu_seconds();
  const Cut cut = cut_row(bounds, options);
  BalanceSearch search{deal_equal_counts(costs_of(bounds, cut), options.cp), cut.chunk, 0};
  search.cpu_seconds = thread_cpu_seconds() - start;
  return search;
}

BalanceSearch balance_joint(const SegmentBounds& bounds, const LayoutOptions& options) {
  const double start = thread_cpu_seconds();
  const Cut cut = cut_row(bounds, options);
  const TimeModel& time = options.time;
  for (const auto& [what, seconds] : {std::pair{"pair", time.seconds_per_pair},
                                      std::pair{"key and value token", time.seconds_per_kv_token}})
    if (!std::isfinite(seconds) || seconds < 0)
      throw_usage("the seconds of a {} must be finite and at least 0, not {}", what, seconds);
  BalanceSearch search{{}, cut.chunk, 0};
  if (cut.count > 0) search.rank_of_chunk = search_joint(chunks_of(bounds, cut), options.cp, time);
  search.cpu_seconds = thread_cpu_seconds() - start;
  return search;
}

Layout layout_of_deal(const char* name, const SegmentBounds& bounds, int cp,
                      const BalanceSearch& search) {
  std::vector<std::vector<SlotRun>> pieces(static_cast<size_t>(cp));
  int64_t start = 0;
  for (const int32_t rank : search.rank_of_chunk) {
    std::vector<SlotRun>& mine = pieces[static_cast<size_t>(rank)];
    if (!mine.empty() && mine.back().start.value() + mine.back().length == start)
      mine.back().length += search.chunk;
    else
      mine.push_back({GlobalToken(start), 1, search.chunk, {}});
    start += search.chunk;
  }
  return make_layout(name, bounds, std::move(pieces));
}

}  // namespace gyre
