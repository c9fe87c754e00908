#include "sharding/cost.hpp"

#include <algorithm>

namespace gyre {
namespace {

struct Held {
  int rank;
  const Fragment* fragment;
};

DocPosition last_position(const Fragment& f) {
  return f.start + (f.length - 1) * f.stride;
}

/// Σ of position + 1 over the queries of a fragment.
int64_t pairs_of(const Fragment& f) {
  return f.length * (f.start.value() + 1) + f.stride * (f.length * (f.length - 1) / 2);
}

/// Number of tokens of a fragment at positions up to `last`.
int64_t tokens_up_to(const Fragment& f, DocPosition last) {
  if (last < f.start) return 0;
  return std::min(f.length, (last - f.start) / f.stride + 1);
}

/// All fragments, sorted by document, and by rank within a document.
std::vector<Held> by_document_and_rank(const Layout& layout) {
  std::vector<Held> held;
  for (int r = 0; r < layout.cp(); ++r)
    for (const Fragment& fragment : layout.shard(r).fragments) held.push_back({r, &fragment});
  // The order by rank within a document is already given.
  std::stable_sort(held.begin(), held.end(), [](const Held& a, const Held& b) {
    return a.fragment->segment < b.fragment->segment;
  });
  return held;
}

/// Calls visit(document_fragments, rank, last position that the rank holds) for every pair of a
/// document and a rank that holds tokens of it.
template <class Visit>
void for_each_holder(const std::vector<Held>& held, Visit visit) {
  for (auto first = held.begin(); first != held.end();) {
    const auto end = std::find_if(first, held.end(), [&](const Held& h) {
      return h.fragment->segment != first->fragment->segment;
    });
    const std::span<const Held> document(first, end);
    for (auto mine = first; mine != end;) {
      const int rank = mine->rank;
      DocPosition last;
      for (; mine != end && mine->rank == rank; ++mine)
        last = std::max(last, last_position(*mine->fragment));
      visit(document, rank, last);
    }
    first = end;
  }
}

double ring_tokens(const LayoutCost& cost) {
  return (std::ssize(cost.ranks) - 1) * static_cast<double>(cost.slots);
}

}  // namespace

int64_t LayoutCost::pairs() const {
  int64_t sum = 0;
  for (const RankCost& rank : ranks) sum += rank.pairs;
  return sum;
}

int64_t LayoutCost::max_pairs() const {
  int64_t most = 0;
  for (const RankCost& rank : ranks) most = std::max(most, rank.pairs);
  return most;
}

double LayoutCost::pair_ratio() const {
  const double all = pairs();
  return all == 0 ? 1 : max_pairs() * static_cast<double>(ranks.size()) / all;
}

double LayoutCost::needed_share() const {
  const double ring = ring_tokens(*this);
  int64_t sum = 0;
  for (const RankCost& rank : ranks) sum += rank.kv_needed;
  return ring == 0 ? 0 : sum / static_cast<double>(ranks.size()) / ring;
}

double LayoutCost::largest_needed_share() const {
  const double ring = ring_tokens(*this);
  int64_t most = 0;
  for (const RankCost& rank : ranks) most = std::max(most, rank.kv_needed);
  return ring == 0 ? 0 : most / ring;
}

double LayoutCost::seconds(const TimeModel& time) const {
  double slowest = 0;
  for (const RankCost& rank : ranks)
    slowest = std::max(
        {slowest, rank.pairs * time.seconds_per_pair, rank.kv_needed * time.seconds_per_kv_token});
  return slowest;
}

LayoutCost layout_cost(const Layout& layout) {
  LayoutCost cost;
  cost.ranks.resize(layout.shards.size());
  cost.slots = layout.shards.empty() ? 0 : layout.shards.front().slots;
  const std::vector<Held> held = by_document_and_rank(layout);
  cost.pieces = std::ssize(held);
  for (const Held& h : held) {
    RankCost& rank = cost.ranks[h.rank];
    rank.real_tokens += h.fragment->length;
    rank.pairs += pairs_of(*h.fragment);
    rank.kv_needed -= h.fragment->length;
  }
  for_each_holder(held, [&](std::span<const Held>, int rank, DocPosition last) {
    cost.ranks[rank].kv_needed += last.value() + 1;
  });
  return cost;
}

std::vector<std::vector<int64_t>> kv_traffic(const Layout& layout) {
  const size_t cp = layout.shards.size();
  std::vector<std::vector<int64_t>> tokens(cp, std::vector<int64_t>(cp, 0));
  for_each_holder(by_document_and_rank(layout),
                  [&](std::span<const Held> document, int rank, DocPosition last) {
                    std::vector<int64_t>& mine = tokens[rank];
                    for (const Held& h : document)
                      if (h.rank != rank) mine[h.rank] += tokens_up_to(*h.fragment, last);
                  });
  return tokens;
}

}  // namespace gyre
