#include "sharding/chunk_assignment.hpp"

#include <functional>
#include <queue>

#include "core/error.hpp"

namespace gyre {

std::vector<int32_t> by_descending_cost(const std::vector<int64_t>& costs) {
  std::vector<int32_t> order(costs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return costs[a] > costs[b]; });
  return order;
}

std::vector<int32_t> assign_equal_counts(const std::vector<int64_t>& costs, int cp) {
  GYRE_CHECK(std::ssize(costs) % cp == 0, "{} chunks for {} ranks", costs.size(), cp);
  const int64_t most = std::ssize(costs) / cp;
  using Load = std::pair<int64_t, int32_t>;  // accumulated cost, rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> open;
  for (int32_t r = 0; r < cp; ++r) open.emplace(0, r);
  std::vector<int64_t> held(cp, 0);
  std::vector<int32_t> rank_of(costs.size());
  for (const int32_t c : by_descending_cost(costs)) {
    const auto [load, rank] = open.top();
    open.pop();
    rank_of[c] = rank;
    if (++held[rank] < most) open.emplace(load + costs[c], rank);
  }
  return rank_of;
}

std::vector<int32_t> assign_equal_counts_reference(const std::vector<int64_t>& costs, int cp) {
  const size_t ranks = cp, most = costs.size() / ranks;
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

Chunks chunks_of(const SegmentBounds& bounds, int64_t chunk, std::vector<int64_t> pairs) {
  const size_t n = pairs.size();
  Chunks chunks{chunk, {}, std::move(pairs), std::vector<int64_t>(n, 0), {}};
  chunks.parts_of.assign(n, {Chunks::none, Chunks::none});
  for (int64_t i = 0; i < bounds.segments(); ++i) {
    const int64_t begin = bounds.begin(i), end = begin + bounds.real_length(i);
    const int64_t first = begin / chunk, last = (end - 1) / chunk;
    if (end == begin || first == last) continue;
    const auto document = static_cast<int32_t>(chunks.documents.size());
    chunks.documents.push_back({begin, end - begin, static_cast<int32_t>(first)});
    for (int64_t c = first; c <= last; ++c) {
      std::array<int32_t, 2>& parts = chunks.parts_of[c];
      (parts[0] == Chunks::none ? parts[0] : parts[1]) = document;
      chunks.tokens[c] += std::min(end, (c + 1) * chunk) - std::max(begin, c * chunk);
    }
  }
  return chunks;
}

}  // namespace gyre
