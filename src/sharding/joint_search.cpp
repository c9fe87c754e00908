#include "sharding/joint_search.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

namespace gyre {
namespace {

/// Assigns chunks by descending cost, each to the rank that is fastest with it (ties: fewest
/// needed keys, lower rank). The last chunk of a document comes first, so that earlier chunks join
/// ranks that already need them.
Assignment assign_by_objective(const Chunks& chunks, int cp, const TimeModel& time) {
  Assignment assignment(chunks, cp, time);
  const int64_t most = chunks.count() / cp;
  for (const int32_t c : by_descending_cost(chunks.pairs)) {
    int32_t best = -1;
    double best_seconds = 0;
    int64_t best_needed = 0;
    for (int32_t r = 0; r < cp; ++r) {
      if (std::ssize(assignment.held(r)) == most) continue;
      const int64_t needed = assignment.needed(r) + assignment.needed_change(r, Chunks::none, c);
      const double seconds = assignment.seconds(assignment.pairs(r) + chunks.pairs[c], needed);
      if (best < 0 || seconds < best_seconds || (seconds == best_seconds && needed < best_needed)) {
        best = r;
        best_seconds = seconds;
        best_needed = needed;
      }
    }
    assignment.add(c, best);
  }
  return assignment;
}

/// Normalisation of the terms of score() and energy().
struct Scale {
  double seconds;          ///< estimate of the best objective
  double needed;           ///< keys that all ranks need under the assignment by compute
  double slowest_allowed;  ///< objective of the best start
};

/// Objective, to be minimised; infinite when slower than the best start.
double score(const Assignment& assignment, const Scale& scale) {
  const double seconds = assignment.slowest_seconds();
  if (seconds > scale.slowest_allowed) return HUGE_VAL;
  return seconds / scale.seconds + 0.01 * assignment.all_needed() / scale.needed;
}

/// One rank's term of the energy. `slowest`, the time of the slowest rank, is the unit of time, so
/// that a threshold means the same in every case.
double energy(const Assignment& assignment, const Scale& scale, double slowest, int64_t pairs,
              int64_t needed) {
  double power = assignment.seconds(pairs, needed) / slowest;
  for (int i = 0; i < 6; ++i) power *= power;
  return power + 0.1 * needed * assignment.cp() / scale.needed;
}

/// Generates random pairs of chunks to swap; see balanced.hpp.
class Proposals {
 public:
  std::pair<int32_t, int32_t> next(const Assignment& assignment) {
    const auto n = static_cast<int32_t>(assignment.rank_of_chunk().size());
    const int32_t x = below(n);
    if (below(5) == 0) return {x, below(n)};
    const int32_t neighbour = std::clamp(below(2) == 0 ? x - 1 : x + 1, 0, n - 1);
    const std::vector<int32_t>& held = assignment.held(assignment.rank_of(neighbour));
    return {x, held[below(static_cast<int32_t>(held.size()))]};
  }

 private:
  int32_t below(int32_t n) { return static_cast<int32_t>(((random_() >> 32) * n) >> 32); }
  std::mt19937_64 random_{1};
};

/// The best assignment visited so far, by score.
struct Best {
  double score = HUGE_VAL;
  std::vector<int32_t> rank_of_chunk;
  void offer(const Assignment& assignment, const Scale& scale) {
    const double offered = gyre::score(assignment, scale);
    if (offered >= score) return;
    score = offered;
    rank_of_chunk = assignment.rank_of_chunk();
  }
};

void anneal(Assignment assignment, const Chunks& chunks, const Scale& scale, Best& best) {
  constexpr double hot = 0.05, cold = 0.0005;
  // A move costs O(cp): beyond 512 ranks there are fewer moves, so that the search ends in seconds.
  constexpr int64_t moves_per_chunk = 400, max_moves = 2'000'000, block = 1024, usual_cp = 512;
  const int64_t more = std::max<int64_t>(usual_cp, assignment.cp()) / usual_cp;
  const int64_t moves = std::min(moves_per_chunk * chunks.count(), max_moves / (more * more));
  const double cooling = std::pow(cold / hot, block / static_cast<double>(moves));
  Proposals proposals;
  double threshold = hot, slowest = assignment.slowest_seconds();
  if (slowest == 0) slowest = scale.seconds;
  for (int64_t i = 0; i < moves; ++i) {
    if (i % block == block - 1) {
      threshold *= cooling;
      if (const double now = assignment.slowest_seconds(); now > 0)
        slowest = std::min(slowest, now);
    }
    const auto [x, y] = proposals.next(assignment);
    const int32_t a = assignment.rank_of(x), b = assignment.rank_of(y);
    if (a == b) continue;
    const int64_t pairs = chunks.pairs[y] - chunks.pairs[x];
    const double change =
        energy(assignment, scale, slowest, assignment.pairs(a) + pairs,
               assignment.needed(a) + assignment.needed_change(a, x, y)) +
        energy(assignment, scale, slowest, assignment.pairs(b) - pairs,
               assignment.needed(b) + assignment.needed_change(b, y, x)) -
        energy(assignment, scale, slowest, assignment.pairs(a), assignment.needed(a)) -
        energy(assignment, scale, slowest, assignment.pairs(b), assignment.needed(b));
    if (!(change < threshold)) continue;
    assignment.swap(x, y);
    if (change < 0) best.offer(assignment, scale);
  }
}

}  // namespace

std::vector<int32_t> search_joint(const Chunks& chunks, int cp, const TimeModel& time) {
  const int64_t per_rank = chunks.count() / cp;
  std::vector<int32_t> in_stream_order(chunks.pairs.size());
  for (size_t c = 0; c < in_stream_order.size(); ++c)
    in_stream_order[c] = static_cast<int32_t>(static_cast<int64_t>(c) / per_rank);
  std::vector<Assignment> starts = {
      Assignment(chunks, cp, time, assign_equal_counts(chunks.pairs, cp)),
      Assignment(chunks, cp, time, in_stream_order),
  };
  constexpr int64_t max_tries = int64_t{1} << 28;
  if (int64_t{chunks.count()} * cp <= max_tries)
    starts.push_back(assign_by_objective(chunks, cp, time));
  Scale scale{0, std::max<double>(1, starts[0].all_needed()), HUGE_VAL};
  for (const Assignment& start : starts)
    scale.slowest_allowed = std::min(scale.slowest_allowed, start.slowest_seconds());
  const int64_t pairs = std::accumulate(chunks.pairs.begin(), chunks.pairs.end(), int64_t{0});
  scale.seconds = std::max(pairs * time.seconds_per_pair / cp, 0.5 * scale.slowest_allowed);
  // If the best start takes no time, only the needed tokens count.
  if (scale.seconds == 0) scale.seconds = 1;
  Best best;
  for (const Assignment& start : starts) best.offer(start, scale);
  if (cp > 1 && per_rank > 1)
    for (const Assignment& start : starts) anneal(start, chunks, scale, best);
  return best.rank_of_chunk;
}

}  // namespace gyre
