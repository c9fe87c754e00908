// Plans without running them: coverage of the mask, closed forms, buffers that are free when they
// are written.

#include "attention/plan.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <map>
#include <set>

#include "attention/schedules/registry.hpp"
#include "core/error.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace {

using Ints = std::vector<int32_t>;

struct Bounds {
  Ints real = {0}, padded = {0};
  SegmentBounds view() const { return {real, padded}; }
};

Bounds bounds_of(const std::vector<int64_t>& lengths, int cp) {
  Bounds bounds;
  for (int64_t n : lengths) {
    bounds.real.push_back(bounds.real.back() + static_cast<int32_t>(n));
    bounds.padded.push_back(bounds.padded.back() + static_cast<int32_t>(round_up(n, 2 * cp)));
  }
  return bounds;
}

/// Stream slot of a local slot of a rank.
struct SlotMap {
  std::vector<Ints> index;
  SlotMap(const SegmentBounds& bounds, int cp) {
    const Layout layout = dual_chunk_swap(bounds, cp);
    for (int r = 0; r < cp; ++r) index.push_back(shard_index(layout, r));
  }
  int64_t operator()(int rank, int64_t local) const {
    return index[static_cast<size_t>(rank)][static_cast<size_t>(local)];
  }
};

/// How often each (query, key) pair of stream slots is computed by all ranks together.
std::map<std::pair<int64_t, int64_t>, int> computed_pairs(const Plan& plan, const SlotMap& slot) {
  std::map<std::pair<int64_t, int64_t>, int> times;
  for (size_t r = 0; r < plan.ranks.size(); ++r)
    for (const Step& s : plan.ranks[r].steps) {
      const auto* compute = std::get_if<step::Compute>(&s);
      if (compute == nullptr) continue;
      for (const Rectangle& rect : compute->rectangles)
        for (int64_t i = 0; i < rect.q_length; ++i)
          for (int64_t j = 0; j < rect.k_length; ++j)
            if (!rect.mask.causal || j <= i + rect.mask.diagonal)
              ++times[{slot(static_cast<int>(r), rect.q_begin.value() + i),
                       slot(compute->kv_owner, rect.k_begin.value() + j)}];
    }
  return times;
}

void expect_covers_mask(const Plan& plan, const Bounds& b, int cp, MaskKind mask) {
  const auto times = computed_pairs(plan, SlotMap(b.view(), cp));
  size_t allowed = 0;
  for (int64_t s = 0; s < b.view().segments(); ++s) {
    const int64_t begin = b.padded[static_cast<size_t>(s)], length = b.view().real_length(s);
    for (int64_t i = 0; i < length; ++i)
      for (int64_t j = 0; j < (mask == MaskKind::causal ? i + 1 : length); ++j, ++allowed) {
        const auto found = times.find({begin + i, begin + j});
        RC_ASSERT(found != times.end() && found->second == 1);
      }
  }
  RC_ASSERT(times.size() == allowed);
}

TEST(Plan, EveryScheduleComputesEveryAllowedPairExactlyOnce) {
  for (const Schedule& schedule : schedules())
    for (const MaskKind mask : {MaskKind::causal, MaskKind::full})
      EXPECT_TRUE(
          rc::check(schedule.name + (mask == MaskKind::causal ? ", causal" : ", full"), [&] {
            const int cp = *rc::gen::inRange(1, 9);
            const auto lengths =
                *rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 40));
            const Bounds b = bounds_of(lengths, cp);
            expect_covers_mask(schedule.plan(dual_chunk_swap(b.view(), cp), mask), b, cp, mask);
          }));
}

TEST(Plan, RectanglesCountTheirPairs) {
  EXPECT_TRUE(rc::check("Rectangle::pairs equals the brute-force count", [] {
    Rectangle r{LocalToken(0),
                *rc::gen::inRange<int64_t>(0, 12),
                LocalToken(0),
                *rc::gen::inRange<int64_t>(0, 12),
                {*rc::gen::arbitrary<bool>(), *rc::gen::inRange<int64_t>(-14, 14)}};
    int64_t pairs = 0;
    for (int64_t i = 0; i < r.q_length; ++i)
      for (int64_t j = 0; j < r.k_length; ++j) pairs += !r.mask.causal || j <= i + r.mask.diagonal;
    RC_ASSERT(r.pairs() == pairs);
  }));
}

TEST(Plan, EveryRankHasTheSameWorkOnFullSegments) {
  // c²(2cp - 1) + c(c + 1) pairs a segment with chunks of c, on every rank; cp - 1 messages of all
  // local slots.
  for (int cp = 1; cp <= 8; ++cp)
    for (int64_t c : {1, 3, 8}) {
      const Bounds b = bounds_of({2 * cp * c, 0, 4 * cp * c}, cp);
      const Plan plan = ring_plan(dual_chunk_swap(b.view(), cp), MaskKind::causal);
      const auto work = [&](int64_t chunk) {
        return chunk * chunk * (2 * cp - 1) + chunk * (chunk + 1);
      };
      for (const RankPlan& rank : plan.ranks) {
        const PlanCount counted = count(rank);
        EXPECT_EQ(counted.pairs, work(c) + work(2 * c));
        EXPECT_EQ(counted.messages, cp - 1);
        EXPECT_EQ(counted.tokens_sent, (cp - 1) * b.padded.back() / cp);
        EXPECT_EQ(counted.peak_kv_tokens, std::min(cp - 1, 2) * b.padded.back() / cp);
      }
    }
}

TEST(Plan, StepsAfterTheFirstAreHalfSteps) {
  // Rank 1 of 3: all queries x first half of rank 0's keys, then second half of the queries x all
  // of rank 2's keys.
  const Bounds b = bounds_of({24}, 3);
  const RankPlan plan = ring_plan(dual_chunk_swap(b.view(), 3), MaskKind::causal).ranks[1];
  std::vector<step::Compute> computes;
  for (const Step& s : plan.steps)
    if (const auto* compute = std::get_if<step::Compute>(&s)) computes.push_back(*compute);
  ASSERT_EQ(computes.size(), 3u);
  EXPECT_EQ(computes[1].kv_owner, 0);
  EXPECT_EQ(computes[1].rectangles,
            (std::vector<Rectangle>{{LocalToken(0), 4, LocalToken(0), 4, {}},
                                    {LocalToken(4), 4, LocalToken(0), 4, {}}}));
  EXPECT_EQ(computes[2].kv_owner, 2);
  EXPECT_EQ(computes[2].rectangles,
            (std::vector<Rectangle>{{LocalToken(4), 4, LocalToken(0), 4, {}},
                                    {LocalToken(4), 4, LocalToken(4), 4, {}}}));
}

TEST(Plan, PaddedSecondChunkGivesNoQueries) {
  // Real length 9 in 12 slots, cp = 2: rank 0's second chunk is all padding.
  const Ints real = {0, 9}, padded = {0, 12};
  const Plan plan = ring_plan(dual_chunk_swap({real, padded}, 2), MaskKind::causal);
  EXPECT_EQ(count(plan.ranks[0]).pairs, 6);
  EXPECT_EQ(count(plan.ranks[1]).pairs, 45 - 6);
  for (const Step& s : plan.ranks[0].steps) {
    const auto* compute = std::get_if<step::Compute>(&s);
    EXPECT_TRUE(compute == nullptr || compute->kv_owner == 0 || compute->rectangles.empty());
  }
}

TEST(Plan, ShortDocumentsStarveRanksAsCounted) {
  const auto pairs = [](int64_t length) {
    const Bounds b = bounds_of(std::vector<int64_t>(8, length), 4);
    std::vector<int64_t> counts;
    for (const RankPlan& rank : ring_plan(dual_chunk_swap(b.view(), 4), MaskKind::causal).ranks)
      counts.push_back(count(rank).pairs);
    return counts;
  };
  EXPECT_EQ(pairs(1), (std::vector<int64_t>{8, 0, 0, 0}));
  EXPECT_EQ(pairs(3), (std::vector<int64_t>{8, 16, 24, 0}));
  EXPECT_EQ(pairs(5), (std::vector<int64_t>{8, 16, 24, 72}));
  EXPECT_EQ(pairs(7), (std::vector<int64_t>{8, 72, 72, 72}));
}

/// Walks all ranks' steps and checks that messages match and that no buffer is used while a
/// transfer owns it.
void expect_buffers_are_safe(const Plan& plan) {
  std::map<std::pair<int, int>, std::vector<int64_t>> sent, received;
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    std::set<int> receiving, sending;
    std::map<int, step::Exchange> open;
    std::set<int> filled = {0};
    for (const Step& s : plan.ranks[r].steps) {
      if (const auto* x = std::get_if<step::Exchange>(&s)) {
        EXPECT_TRUE(filled.count(x->send_slot)) << "sends an empty slot";
        EXPECT_FALSE(receiving.count(x->recv_slot) || sending.count(x->recv_slot))
            << "receives into a busy slot";
        EXPECT_NE(x->recv_slot, 0) << "overwrites the rank's own block";
        receiving.insert(x->recv_slot);
        sending.insert(x->send_slot);
        open[x->id] = *x;
        sent[{static_cast<int>(r), x->to}].push_back(x->send_tokens);
        received[{x->from, static_cast<int>(r)}].push_back(x->recv_tokens);
      } else if (const auto* w = std::get_if<step::Wait>(&s)) {
        ASSERT_TRUE(open.count(w->id));
        receiving.erase(open[w->id].recv_slot);
        sending.erase(open[w->id].send_slot);
        filled.insert(open[w->id].recv_slot);
        open.erase(w->id);
      } else {
        const int slot = std::get<step::Compute>(s).slot;
        EXPECT_TRUE(filled.count(slot) && !receiving.count(slot))
            << "computes on slot " << slot << " too early";
      }
    }
    EXPECT_TRUE(open.empty()) << "an exchange is never waited for";
  }
  EXPECT_EQ(sent, received);
}

TEST(Plan, BuffersAreFreeWhenWrittenAndFullWhenRead) {
  for (const Schedule& schedule : schedules())
    for (int cp = 1; cp <= 9; ++cp) {
      const Bounds b = bounds_of({5, 17, 0, 64}, cp);
      expect_buffers_are_safe(schedule.plan(dual_chunk_swap(b.view(), cp), MaskKind::causal));
    }
}

TEST(Registry, UnknownScheduleListsTheKnownOnes) {
  try {
    find_schedule("rnig");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_NE(std::string(error.what()).find("no schedule 'rnig'; there are: ring"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace gyre
