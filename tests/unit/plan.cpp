// Plans of all schedules without running them: every pair of the mask once, messages that meet,
// storages that are free when they are written. The machine that finds out is in
// tests/support/attention_cases.hpp; here it is also seen to find faults.

#include "attention/plan.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <functional>
#include <tuple>

#include "attention/schedules/registry.hpp"
#include "attention_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::AttentionCase;
using test::expect_usage;
using test::full_bounds;
using test::layout_case;
using test::plan_fault;
using test::shape_of;
using Longs = std::vector<int64_t>;

TEST(Plan, OfEveryScheduleComputesEveryPairOnceFromDataThatIsThere) {
  for (const Schedule& schedule : schedules())
    EXPECT_TRUE(rc::check(schedule.name, [&] {
      const AttentionCase c = test::arbitrary_attention(*rc::gen::inRange(1, 9));
      const AttentionProblem problem = c.problem();
      RC_PRE(schedule.why_not(problem).empty());
      RC_LOG() << c.layout.kind << ", heads " << c.heads.heads << ":" << c.heads.kv_heads
               << ", window " << c.mask.window << "\n";
      RC_ASSERT(plan_fault(plan_all(schedule, problem), problem, c.bounds()) == "");
    }));
}

#ifdef __SANITIZE_ADDRESS__
constexpr int many_ranks = 32;  // every step takes ten times as long
#else
constexpr int many_ranks = 64;
#endif

TEST(Plan, IsRightOnManyRanks) {
  struct Case {
    std::string kind;
    int64_t stripe;
    MaskRule mask;
  };
  const MaskRule causal, window(MaskKind::causal, 3);
  for (const Case& x : std::vector<Case>{{"contiguous", 1, causal},
                                         {"dual-chunk-swap", 1, causal},
                                         {"dual-chunk-swap", 1, {MaskKind::causal, 2}},
                                         {"striped", 2, window}}) {
    AttentionCase c;
    c.layout = layout_case(x.kind, test::bounds_of({5, 0, 100, 130}, {128, 0, 128, 256}),
                           many_ranks, x.stripe);
    c.heads = shape_of(6, 2);
    c.mask = x.mask;
    const AttentionProblem problem = c.problem();
    for (const Schedule& schedule : schedules())
      if (schedule.why_not(problem).empty()) {
        EXPECT_EQ(plan_fault(plan_all(schedule, problem), problem, c.bounds()), "") << x.kind;
      }
  }
}

TEST(Plan, ForForwardHasTheSameForwardStepsAndNoOthers) {
  const ElementTypes types;
  EXPECT_TRUE(rc::check("plans of one rank", [&] {
    const AttentionCase c = test::arbitrary_attention(*rc::gen::inRange(1, 9));
    const AttentionProblem both = c.problem();
    AttentionProblem forward = both;
    forward.passes = PlanPasses::forward;
    const int rank = *rc::gen::inRange(0, both.cp());
    for (const Schedule& schedule : schedules()) {
      if (!schedule.why_not(both).empty()) continue;
      const RankPlan expected = plan_rank(schedule, both, rank);
      const RankPlan plan = plan_rank(schedule, forward, rank);
      RC_ASSERT(plan.backward.empty());
      RC_ASSERT(plan.stats == expected.stats);
      RC_ASSERT(plan.forward.size() == expected.forward.size());
      for (size_t i = 0; i < plan.forward.size(); ++i) {
        RC_ASSERT(plan.forward[i].index() == expected.forward[i].index());
        if (const auto* compute = std::get_if<step::Compute>(&plan.forward[i])) {
          RC_ASSERT(compute->rectangles == std::get<step::Compute>(expected.forward[i]).rectangles);
        }
      }
      const PlanCount a = count(plan, Pass::forward, both.heads, types);
      const PlanCount b = count(expected, Pass::forward, both.heads, types);
      RC_ASSERT(std::tie(a.pairs, a.messages, a.bytes_sent, a.bytes_received, a.transient_bytes) ==
                std::tie(b.pairs, b.messages, b.bytes_sent, b.bytes_received, b.transient_bytes));
    }
  }));
}

TEST(Plan, WhatIsSentIsReceived) {
  EXPECT_TRUE(rc::check("bytes of all ranks", [] {
    const AttentionCase c = test::arbitrary_attention(*rc::gen::inRange(1, 9));
    const AttentionProblem problem = c.problem();
    const ElementTypes types{DType::bf16, DType::f32, DType::f32, DType::bf16};
    for (const Schedule& schedule : schedules()) {
      if (!schedule.why_not(problem).empty()) continue;
      const Plan plan = plan_all(schedule, problem);
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        int64_t sent = 0, received = 0;
        for (const RankPlan& rank : plan.ranks) {
          const PlanCount counted = count(rank, pass, problem.heads, types);
          sent += counted.bytes_sent;
          received += counted.bytes_received;
        }
        RC_ASSERT(sent == received);
      }
    }
  }));
}

/// Changes one step of a plan; false if it is not of the kind that this changes.
using Change = std::function<bool(RankPlan& plan, std::vector<Step>& steps, size_t step)>;

/// A problem in which every rank needs something of every other.
AttentionCase busy_case() {
  AttentionCase c;
  c.layout = layout_case("dual-chunk-swap", full_bounds({16, 8}), 4);
  c.heads = shape_of(4, 2);
  return c;
}

/// Expects that the machine finds each such change, on any rank and at any step of any schedule.
void expect_found(const Change& change, int at_least) {
  const AttentionCase c = busy_case();
  AttentionProblem problem = c.problem();
  int changed = 0;
  for (const Schedule& schedule : schedules()) {
    if (!schedule.why_not(problem).empty()) continue;
    const Plan plan = plan_all(schedule, problem);
    ASSERT_EQ(plan_fault(plan, problem, c.bounds()), "");
    for (const size_t rank : {0, 2})
      for (const Pass pass : {Pass::forward, Pass::backward})
        for (size_t step = 0; step < plan.ranks[rank].steps(pass).size(); ++step) {
          Plan broken = plan;
          RankPlan& mine = broken.ranks[rank];
          if (!change(mine, pass == Pass::forward ? mine.forward : mine.backward, step)) continue;
          ++changed;
          EXPECT_NE(plan_fault(broken, problem, c.bounds()), "")
              << schedule.name << ", rank " << rank << ", " << name_of(pass) << " step " << step;
        }
  }
  EXPECT_GE(changed, at_least);
}

/// Moves a step to the end of its list.
void move_to_end(std::vector<Step>& steps, size_t step) {
  std::rotate(steps.begin() + static_cast<std::ptrdiff_t>(step),
              steps.begin() + static_cast<std::ptrdiff_t>(step) + 1, steps.end());
}
void remove(std::vector<Step>& steps, size_t step) {
  steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(step));
}
step::Exchange* exchange_at(std::vector<Step>& steps, size_t step) {
  return std::get_if<step::Exchange>(&steps[step]);
}

TEST(PlanMachine, FindsSlicesAtAWrongOffset) {
  for (const bool sent : {true, false})
    expect_found(
        [&](RankPlan& plan, std::vector<Step>& steps, size_t step) {
          step::Exchange* x = exchange_at(steps, step);
          if (x == nullptr || (sent ? x->sends : x->recvs).empty()) return false;
          Slice& slice = (sent ? x->sends : x->recvs).back().slices.back();
          const PlanArray& array = plan.arrays[slice.array];
          if (slice.row + slice.rows < array.tokens())
            ++slice.row;
          else if (slice.row > 0)
            --slice.row;
          else
            --slice.rows;
          return true;
        },
        40);
}

TEST(PlanMachine, FindsSlicesOfWrongHeads) {
  expect_found(
      [](RankPlan& plan, std::vector<Step>& steps, size_t step) {
        step::Exchange* x = exchange_at(steps, step);
        if (x == nullptr || x->sends.empty()) return false;
        Slice& slice = x->sends.front().slices.front();
        if (slice.heads.end() == plan.arrays[slice.array].heads.end()) return false;
        ++slice.heads.begin;
        return true;
      },
      4);
}

TEST(PlanMachine, FindsAMissingWait) {
  expect_found(
      [](RankPlan&, std::vector<Step>& steps, size_t step) {
        if (!std::holds_alternative<step::Wait>(steps[step])) return false;
        remove(steps, step);
        return true;
      },
      60);
}

TEST(PlanMachine, FindsAWaitForKeysThatComesTooLate) {
  expect_found(
      [](RankPlan& plan, std::vector<Step>& steps, size_t step) {
        const auto* wait = std::get_if<step::Wait>(&steps[step]);
        if (wait == nullptr) return false;
        for (size_t i = 0; i < step; ++i) {
          const step::Exchange* x = exchange_at(steps, i);
          if (x == nullptr || x->id != wait->id || x->recvs.empty()) continue;
          const int array = x->recvs.front().slices.front().array;
          if (plan.arrays[array].kind != ArrayKind::kv) return false;
          move_to_end(steps, step);
          return true;
        }
        return false;
      },
      40);
}

TEST(PlanMachine, FindsExchangesInAnotherOrder) {
  expect_found(
      [](RankPlan&, std::vector<Step>& steps, size_t step) {
        // Of all-to-all the two that go to the heads, of the others gathers before hops.
        if (step + 1 >= steps.size() || exchange_at(steps, step) == nullptr ||
            exchange_at(steps, step + 1) == nullptr)
          return false;
        std::swap(steps[step], steps[step + 1]);
        return true;
      },
      4);
}

TEST(PlanMachine, FindsPairsThatAreMissingOrTwice) {
  for (const bool twice : {true, false})
    expect_found(
        [&](RankPlan&, std::vector<Step>& steps, size_t step) {
          auto* compute = std::get_if<step::Compute>(&steps[step]);
          if (compute == nullptr) return false;
          if (twice)
            compute->rectangles.push_back(compute->rectangles.back());
          else
            compute->rectangles.pop_back();
          return true;
        },
        60);
}

TEST(PlanMachine, FindsAMaskThatIsOffByOne) {
  for (const int64_t off : {-1, 1})
    expect_found(
        [&](RankPlan&, std::vector<Step>& steps, size_t step) {
          auto* compute = std::get_if<step::Compute>(&steps[step]);
          if (compute == nullptr) return false;
          for (Rectangle& r : compute->rectangles)
            if (r.mask.causal) {
              r.mask.offset += off;
              return true;
            }
          return false;
        },
        10);
}

TEST(PlanMachine, FindsSumsThatAreNotSetOrNotAdded) {
  expect_found(
      [](RankPlan&, std::vector<Step>& steps, size_t step) {
        if (!std::holds_alternative<step::Clear>(steps[step])) return false;
        remove(steps, step);
        return true;
      },
      60);
  expect_found(
      [](RankPlan&, std::vector<Step>& steps, size_t step) {
        step::Exchange* x = exchange_at(steps, step);
        if (x == nullptr || x->recvs.empty() || !x->recvs.back().slices.back().add) return false;
        x->recvs.back().slices.back().add = false;
        return true;
      },
      20);
}

TEST(PlanMachine, FindsAStepThatIsLeftOut) {
  expect_found(
      [](RankPlan&, std::vector<Step>& steps, size_t step) {
        if (exchange_at(steps, step) != nullptr) return false;  // others would wait for it
        remove(steps, step);
        return true;
      },
      100);
}

TEST(PlanMachine, FindsBlocksThatShareAStorageWhileBothAreUsed) {
  AttentionCase c = busy_case();
  const AttentionProblem problem = c.problem();
  for (const char* name : {"ring", "ring-forward", "all-gather-strided", "group-cast"}) {
    Plan plan = plan_all(find_schedule(name), problem);
    ASSERT_EQ(plan_fault(plan, problem, c.bounds()), "");
    for (size_t i = array_kinds; i < plan.ranks[1].arrays.size(); ++i)
      if (plan.ranks[1].arrays[i].kind == ArrayKind::kv) plan.ranks[1].arrays[i].storage = 100;
    EXPECT_NE(plan_fault(plan, problem, c.bounds()), "") << name;
  }
}

TEST(PlanMachine, FindsAnOutputThatDoesNotStay) {
  AttentionCase c = busy_case();
  const AttentionProblem problem = c.problem();
  for (const char* name : {"ring", "all-gather", "all-to-all"}) {
    Plan plan = plan_all(find_schedule(name), problem);
    RankPlan& rank = plan.ranks[1];
    int out = -1, d_q = -1;
    for (const Step& s : rank.backward) {
      if (const auto* delta = std::get_if<step::Delta>(&s)) out = delta->out;
      if (const auto* compute = std::get_if<step::Compute>(&s)) d_q = compute->d_q;
    }
    rank.arrays[d_q].storage = rank.arrays[out].storage;
    EXPECT_NE(plan_fault(plan, problem, c.bounds()).find("any more"), std::string::npos) << name;
  }
}

TEST(PlanMachine, FindsRanksThatWaitForEachOther) {
  // Both send in one exchange and receive in the next one: the first never ends.
  AttentionCase c;
  c.layout = layout_case("contiguous", full_bounds({4}), 2);
  c.heads = shape_of(1, 1);
  const AttentionProblem problem = c.problem();
  Plan plan = plan_all(find_schedule("all-gather"), problem);
  for (RankPlan& rank : plan.ranks)
    for (size_t i = 0; i < rank.forward.size(); ++i)
      if (step::Exchange* x = exchange_at(rank.forward, i)) {
        step::Exchange second{x->id + 100, "second", {}, x->recvs};
        x->recvs.clear();
        rank.forward.insert(rank.forward.begin() + static_cast<std::ptrdiff_t>(i) + 1, second);
        for (Step& s : rank.forward)
          if (auto* wait = std::get_if<step::Wait>(&s)) wait->id += 100;
        rank.forward.emplace_back(step::Wait{second.id - 100});
        break;
      }
  EXPECT_EQ(plan_fault(plan, problem, c.bounds()), "all-gather: fwd rank 0 step 5: waits for ever");
}

TEST(ShardOf, RowsThatGoOnAreOneFragment) {
  // Chunks 0|5, 1|4, 2|3 of three ranks; the last rank's are neighbours.
  const auto c = layout_case("dual-chunk-swap", full_bounds({12}), 3);
  const auto whole = [](int rank) { return RankRows{rank, LocalToken(0), 4}; };
  const auto fragment = [](int64_t start, int64_t length, int64_t row) {
    return Fragment{0, DocPosition(start), 1, length, LocalToken(row)};
  };
  EXPECT_EQ(shard_of(c.layout, {whole(2), whole(0)}).fragments,
            (std::vector<Fragment>{fragment(4, 4, 0), fragment(0, 2, 4), fragment(10, 2, 6)}));
  // Parts of runs, in the document's order: all of it but the last token.
  const std::vector<RankRows> parts = {{0, LocalToken(0), 2},
                                       {1, LocalToken(0), 2},
                                       {2, LocalToken(0), 4},
                                       {1, LocalToken(2), 2},
                                       {0, LocalToken(2), 1}};
  EXPECT_EQ(shard_of(c.layout, parts).fragments, (std::vector<Fragment>{fragment(0, 11, 0)}));
  EXPECT_EQ(shard_of(c.layout, parts).slots, 11);
  // Single tokens of a stripe are as good as a run.
  const auto striped = layout_case("striped", full_bounds({6}), 3);
  EXPECT_EQ(shard_of(striped.layout, {{1, LocalToken(0), 1}, {2, LocalToken(0), 1}}).fragments,
            (std::vector<Fragment>{fragment(1, 2, 0)}));
  EXPECT_EQ(shard_of(striped.layout, {{1, LocalToken(0), 2}, {2, LocalToken(1), 1}}).fragments,
            (std::vector<Fragment>{{0, DocPosition(1), 3, 2, LocalToken(0)},
                                   {0, DocPosition(5), 3, 1, LocalToken(2)}}));
  // Positions 0 2 4, then 3: not a run, although 3 is three after 0; nor is 1, then 2 4.
  const auto halves = layout_case("striped", full_bounds({6}), 2);
  EXPECT_EQ(
      shard_of(halves.layout, {{0, LocalToken(0), 3}, {1, LocalToken(1), 1}}).fragments.size(), 2u);
  EXPECT_EQ(
      shard_of(halves.layout, {{1, LocalToken(0), 1}, {0, LocalToken(1), 2}}).fragments.size(), 2u);
}

TEST(Halo, TakesTheLargestWindowThatNeighboursCanServe) {
  const Schedule halo = find_schedule("halo");
  struct Case {
    std::string kind;
    int64_t stripe, largest;
    std::string refusal;
  };
  // 48 tokens on 4 ranks: 12 consecutive ones and one more; a chunk of 6 and one more; ...
  const std::vector<Case> cases = {{"contiguous", 1, 13, "rank 2 needs keys of rank 0"},
                                   {"dual-chunk-swap", 1, 7, "rank 2 needs keys of rank 0"},
                                   {"striped", 4, 5, "rank 2 needs keys of rank 0"},
                                   {"striped", 1, 2, "rank 2 needs keys of rank 0"}};
  for (const Case& x : cases) {
    AttentionCase c;
    c.layout = layout_case(x.kind, full_bounds({48}), 4, x.stripe);
    c.heads = shape_of(4, 2);
    for (c.mask = {MaskKind::causal, 1}; c.mask.window <= x.largest; ++c.mask.window) {
      const AttentionProblem problem = c.problem();
      const Plan plan = plan_all(find_schedule("halo"), problem);
      EXPECT_EQ(plan_fault(plan, problem, c.bounds()), "") << x.kind;
    }
    EXPECT_EQ(halo.why_not(c.problem()),
              fmt::format("with a window of {}, {}, which is not its neighbour; the largest window "
                          "that works is {}",
                          x.largest + 1, x.refusal, x.largest));
    c.mask = {};
    EXPECT_EQ(
        halo.why_not(c.problem()),
        fmt::format("needs a causal mask with a window; the largest that works is {}", x.largest));
  }
  AttentionCase c;
  c.layout = layout_case("contiguous", full_bounds({48}), 3);
  c.heads = shape_of(4, 2);
  c.mask = MaskKind::full;
  EXPECT_EQ(halo.why_not(c.problem()), "needs a causal mask with a window; any will do");
  c.mask = {MaskKind::causal, 48};
  EXPECT_EQ(halo.why_not(c.problem()), "");
}

TEST(Halo, MovesTheBordersOfTheWindowOnly) {
  // A window of 4 under dual-chunk-swap on 4 ranks: 3 tokens of either neighbour; the chunks of the
  // last rank touch, and rank 0 has the ends of the sequence.
  AttentionCase c;
  c.layout = layout_case("dual-chunk-swap", full_bounds({48}), 4);
  c.heads = shape_of(4, 2);
  c.mask = {MaskKind::causal, 4};
  const AttentionProblem problem = c.problem();
  const int64_t row = 2 * 2 * c.heads.head_dim * 4;
  const Longs sent = {3, 6, 6, 3}, received = {3, 6, 6, 3};
  for (int r = 0; r < 4; ++r) {
    const RankPlan plan = find_schedule("halo").plan(problem, r);
    const PlanCount forward = count(plan, Pass::forward, c.heads, {}),
                    backward = count(plan, Pass::backward, c.heads, {});
    EXPECT_EQ(forward.bytes_sent, sent[r] * row);
    EXPECT_EQ(forward.bytes_received, received[r] * row);
    EXPECT_EQ(backward.bytes_sent, received[r] * row);
    EXPECT_EQ(forward.messages, r == 0 || r == 3 ? 1 : 2);
  }
}

/// The rectangles of all Compute steps.
std::vector<std::vector<Rectangle>> rectangles_of(const std::vector<Step>& steps) {
  std::vector<std::vector<Rectangle>> all;
  for (const Step& s : steps)
    if (const auto* compute = std::get_if<step::Compute>(&s)) all.push_back(compute->rectangles);
  return all;
}

TEST(Canonical, ADocumentIsOneRunOfKeysAndOfQueriesWhateverTheLayout) {
  for (const auto& kind : layout_kinds())
    for (const int cp : {1, 2, 4}) {
      AttentionCase c;
      c.layout = layout_case(kind.name, full_bounds({16, 8}), cp);
      c.heads = shape_of(2, 1);
      const AttentionProblem problem = c.problem();
      for (int r = 0; r < cp; ++r) {
        const RankPlan plan = find_schedule("canonical").plan(problem, r);
        const auto forward = rectangles_of(plan.forward), backward = rectangles_of(plan.backward);
        for (const Rectangle& x : forward.at(0)) {
          EXPECT_EQ(x.k_begin, x.k_length == 16 ? 0 : 16) << kind.name;
          EXPECT_TRUE(x.k_length == 16 || x.k_length == 8) << kind.name;
        }
        EXPECT_EQ(backward.at(0), forward.at(0));
        for (const Rectangle& x : backward.at(1)) {
          EXPECT_EQ(x.q_begin, x.q_length == 16 ? 0 : 16) << kind.name;
          EXPECT_TRUE(x.q_length == 16 || x.q_length == 8) << kind.name;
        }
      }
    }
}

TEST(AllToAll, DealsHeadsEvenlyAndTheKvHeadsThatTheyRead) {
  const auto dealt = [](HeadShape shape, int cp) {
    std::vector<Longs> heads;
    for (int r = 0; r < cp; ++r) {
      const HeadRange q = assigned_heads(shape.heads, cp, r), kv = kv_heads_read(q, shape.group());
      heads.push_back({q.begin, q.count, kv.begin, kv.count});
    }
    return heads;
  };
  EXPECT_EQ(dealt(shape_of(6, 2), 4),
            (std::vector<Longs>{{0, 2, 0, 1}, {2, 2, 0, 2}, {4, 1, 1, 1}, {5, 1, 1, 1}}));
  EXPECT_EQ(dealt(shape_of(2, 1), 3),
            (std::vector<Longs>{{0, 1, 0, 1}, {1, 1, 0, 1}, {2, 0, 0, 0}}));
  EXPECT_EQ(dealt(shape_of(8, 4), 2), (std::vector<Longs>{{0, 4, 0, 2}, {4, 4, 2, 2}}));
}

TEST(AllToAll, ADocumentIsOneRectangle) {
  for (const char* kind : {"contiguous", "dual-chunk-swap", "balanced"})
    for (const int cp : {2, 4}) {
      AttentionCase c;
      c.layout = layout_case(kind, full_bounds({16, 8}), cp);
      c.heads = shape_of(4, 4);
      for (int r = 0; r < cp; ++r) {
        const RankPlan plan = find_schedule("all-to-all").plan(c.problem(), r);
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          const auto calls = rectangles_of(plan.steps(pass));
          ASSERT_EQ(calls.size(), 1U) << kind;
          ASSERT_EQ(calls[0].size(), 2U) << kind;
          EXPECT_EQ(calls[0][0].q_length, 16) << kind;
          EXPECT_EQ(calls[0][1].k_length, 8) << kind;
        }
      }
    }
}

TEST(AllToAllRing, ChoosesGroupsThatShareNoKvHead) {
  const auto chosen = [](int cp, int64_t kv_heads) {
    const auto c = layout_case("contiguous", full_bounds({16}), cp);
    const RankPlan plan =
        plan_rank(find_schedule("all-to-all-ring"), {&c.layout, shape_of(16, kv_heads), {}, {}}, 0);
    // Where final statistics are: those of one run of rows for each rank of the group.
    return plan.arrays[plan.stats].rows.size();
  };
  EXPECT_EQ(chosen(8, 8), 2U);
  EXPECT_EQ(chosen(16, 8), 4U);
  EXPECT_EQ(chosen(16, 2), 2U);
  EXPECT_EQ(chosen(9, 8), 1U);
  EXPECT_EQ(chosen(2, 2), 1U);
}

TEST(Registry, RefusesWhatAScheduleCannotDo) {
  AttentionCase c;
  c.layout = layout_case("contiguous", full_bounds({24}), 12);
  c.heads = shape_of(4, 2);
  const auto plan = [&](const char* name, int64_t inner, int64_t heads_at_once) {
    c.options = {inner, heads_at_once};
    plan_rank(find_schedule(name), c.problem(), 0);
    plan_all(find_schedule(name), c.problem());
  };
  expect_usage(
      "schedule all-to-all-ring: inner groups of 5 do not divide 12 ranks; the nearest that do are "
      "4 and 6",
      [&] { plan("all-to-all-ring", 5, 1); });
  expect_usage(
      "schedule all-to-all-ring: an inner group of 13 of 12 ranks; the nearest valid one is 12",
      [&] { plan("all-to-all-ring", 13, 1); });
  expect_usage(
      "schedule all-to-all-ring: an inner group of -2 of 12 ranks; the nearest valid one is 1",
      [&] { plan("all-to-all-ring", -2, 1); });
  expect_usage(
      "schedule all-gather-strided: 3 KV heads at once of 2; the nearest valid number is 2",
      [&] { plan("all-gather-strided", 0, 3); });
  expect_usage(
      "schedule all-gather-strided: 0 KV heads at once of 2; the nearest valid number is 1",
      [&] { plan("all-gather-strided", 0, 0); });
}

TEST(Registry, AnUnknownScheduleListsTheKnownOnes) {
  std::string names;
  for (const Schedule& schedule : schedules()) names += (names.empty() ? "" : ", ") + schedule.name;
  expect_usage("no schedule 'rnig'; there are: " + names, [] { find_schedule("rnig"); });
}

}  // namespace GYRE_FILE
}  // namespace gyre
