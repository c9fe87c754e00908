// Plans of schedules of states, for all ranks: what each rank computes, sends and is sent, on
// random documents, and in time.

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>

#include "errors.hpp"
#include "recurrence/halo.hpp"
#include "recurrence/schedules/schedule.hpp"
#include "recurrence/simulate.hpp"
#include "recurrence_cases.hpp"
#include "sharding/padded_layout.hpp"

namespace gyre {
namespace GYRE_FILE {

using namespace state_step;

LayoutOptions of_ranks(int cp) {
  LayoutOptions options;
  options.cp = cp;
  return options;
}

struct Plans {
  Plans(const StateSchedule& schedule_, const std::vector<int64_t>& lengths, int cp,
        const char* layout = "contiguous", int64_t convolution = 0)
      : schedule(schedule_),
        placed(offsets_of(lengths), find_layout(layout), of_ranks(cp)),
        problem{&placed.layout, {test::named(recurrence_kinds(), "gdn"), 1, 2, 4, 3}} {
    problem.shape.convolution = convolution;
    for (int r = 0; r < cp; ++r) ranks.push_back(plan_rank(schedule, problem, r));
  }
  static std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
    std::vector<int64_t> offsets{0};
    for (const int64_t length : lengths) offsets.push_back(offsets.back() + length);
    return offsets;
  }
  template <class Kind>
  std::vector<Kind> steps(int rank, Pass pass) const {
    std::vector<Kind> found;
    for (const StateStep& step : ranks.at(rank).steps(pass))
      if (const auto* one = std::get_if<Kind>(&step)) found.push_back(*one);
    return found;
  }
  const StateSchedule& schedule;
  PaddedLayout placed;
  RecurrenceProblem problem;
  std::vector<StatePlan> ranks;
};

RC_GTEST_PROP(RecurrencePlan, EveryPartRunsOnceAndEveryMessageArrives, ()) {
  const auto lengths = *rc::gen::nonEmpty(
      rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 20)));
  const int cp = *rc::gen::inRange(1, 9);
  const int64_t convolution = *rc::gen::inRange(0, 12);
  for (const StateSchedule& schedule : state_schedules()) {
    const Plans plans(schedule, lengths, cp, "contiguous", convolution);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      int64_t sent = 0, received = 0;
      for (int r = 0; r < cp; ++r) {
        std::map<int, int> runs;
        for (const Run& run : plans.steps<Run>(r, pass)) ++runs[run.part];
        RC_ASSERT(runs.size() == plans.ranks[r].parts.size());
        for (const auto& [part, times] : runs) RC_ASSERT(times == 1);
        const StateCount counted = count(plans.ranks[r], pass, plans.problem.shape);
        const StateForm form = closed_form(schedule, plans.problem, r, pass);
        RC_ASSERT(counted.messages == form.messages);
        RC_ASSERT(counted.bytes_sent == form.bytes_sent);
        sent += counted.bytes_sent;
        received += counted.bytes_received;
      }
      RC_ASSERT(sent == received);
      simulate(plans.ranks, pass, plans.problem.shape, {});  // throws if a rank waits forever
    }
  }
}

TEST(RecurrencePlan, ChainsAreTheRanksOfADocument) {
  // tokens   0 0 0 0 | 0 0 0 0 | 0 0 1 1 | 1 2 2 2
  const Plans plans(state_schedules().front(), {10, 3, 3}, 4);
  const Layout& layout = plans.placed.layout;
  EXPECT_EQ(chain_of(layout, 0).behind, (std::vector<int>{1, 2}));
  EXPECT_EQ(chain_of(layout, 1).before, (std::vector<int>{0}));
  EXPECT_TRUE(chain_of(layout, 1).passes_through);
  EXPECT_EQ(chain_of(layout, 2).before, (std::vector<int>{0, 1}));
  EXPECT_EQ(chain_of(layout, 2).behind, (std::vector<int>{3}));
  EXPECT_FALSE(chain_of(layout, 2).passes_through);
  EXPECT_EQ(chain_of(layout, 3).before, (std::vector<int>{2}));
  EXPECT_TRUE(chain_of(layout, 3).behind.empty());
}

// A rank whose last document ends with it, and one without tokens, send the identity.
TEST(RecurrencePlan, WhatDoesNotContinueIsTheIdentity) {
  // tokens   0 0 0 | 0 1 1 | 2 2 2 | 2 . .
  const Plans plans(test::named(state_schedules(), "state-gather"), {4, 2, 4}, 4);
  const std::vector<int> parts = {0, -1, 0, -1};
  for (int r = 0; r < 4; ++r) {
    const Summarize sum = plans.steps<Summarize>(r, Pass::forward).at(0);
    EXPECT_EQ(sum.part, parts[r]) << r;
    EXPECT_EQ(sum.begins, parts[r] == 0) << r;
  }
  const std::vector<int> back = {-1, 0, -1, 0};
  for (int r = 0; r < 4; ++r)
    EXPECT_EQ(plans.steps<SummarizeBack>(r, Pass::backward).at(0).part, back[r]) << r;
}

/// The tokens of a piece, by document and position, and the place in a history of each.
using Tokens = std::map<std::tuple<int, int, int64_t>, std::pair<int64_t, int64_t>>;

// Every part reads the tokens before it, as many as a convolution needs and its document has, each
// once, from the part that has it. Also where a rank has several parts of a document.
RC_GTEST_PROP(RecurrencePlan, HistoriesAreTheTokensBefore, ()) {
  const auto lengths = *rc::gen::nonEmpty(
      rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 20)));
  const int cp = *rc::gen::inRange(1, 6);
  const int64_t width = *rc::gen::inRange(1, 12);
  const char* layout = *rc::gen::element("contiguous", "dual-chunk-swap", "zigzag");
  const PaddedLayout placed(Plans::offsets_of(lengths), find_layout(layout), of_ranks(cp));
  Tokens got, want;
  for (const HistoryPiece& piece : history_pieces(placed.layout, width)) {
    const Fragment& from = placed.layout.shard(piece.from).fragments.at(piece.from_part);
    for (int64_t i = 0; i < piece.rows; ++i) {
      RC_ASSERT(piece.row + i < from.length);
      RC_ASSERT(got.emplace(std::tuple(piece.to, piece.to_part, piece.at + i),
                            std::pair(from.segment, from.start.value() + piece.row + i))
                    .second);
    }
  }
  for (int r = 0; r < cp; ++r) {
    const std::vector<Fragment>& parts = placed.layout.shard(r).fragments;
    for (size_t p = 0; p < parts.size(); ++p) {
      const int64_t start = parts[p].start.value(), rows = history_rows(parts[p], width);
      RC_ASSERT(rows == std::min(start, width - 1));
      for (int64_t i = 0; i < rows; ++i)
        want[{r, static_cast<int>(p), i}] = {parts[p].segment, start - rows + i};
    }
  }
  RC_ASSERT(got == want);
}

TEST(RecurrencePlan, NothingIsSentIfNoDocumentCrosses) {
  for (const StateSchedule& schedule : state_schedules()) {
    const Plans plans(schedule, {6, 2, 4, 6}, 3);
    for (int r = 0; r < 3; ++r)
      EXPECT_EQ(count(plans.ranks[r], Pass::forward, plans.problem.shape).messages, 0);
  }
}

TEST(RecurrencePlan, ClosedFormsAreThoseOfThePages) {
  // H_v d_k (d_k + d_v) 4 bytes a map and its state, H_v d_k d_v 4 a state; H_v 2, d_k 4, d_v 3.
  const Plans gather(test::named(state_schedules(), "state-gather"), {16}, 4);
  EXPECT_EQ(count(gather.ranks[0], Pass::forward, gather.problem.shape).bytes_sent,
            3 * 2 * 4 * (4 + 3) * 4);
  EXPECT_EQ(count(gather.ranks[0], Pass::backward, gather.problem.shape).bytes_sent,
            3 * 2 * 4 * 3 * 4);
  const Plans chain(test::named(state_schedules(), "state-chain"), {16}, 4);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(count(chain.ranks[r], Pass::forward, chain.problem.shape).bytes_sent,
              r < 3 ? 2 * 4 * 3 * 4 : 0);
    EXPECT_EQ(count(chain.ranks[r], Pass::backward, chain.problem.shape).bytes_sent,
              r > 0 ? 2 * 4 * 3 * 4 : 0);
  }
}

// 16 tokens on 4 ranks, a convolution of 6: histories of 4 tokens, then of 5, on two ranks. Rows have
// 2 · 1 · 4 + 2 · 3 channels.
TEST(RecurrencePlan, ClosedFormsOfAConvolution) {
  const Plans plans(test::named(state_schedules(), "state-chain"), {16}, 4, "contiguous", 6);
  const RecurrenceShape& shape = plans.problem.shape;
  const int64_t row = 14, weights = 2 * 3 * row * 6 * 4 / 4, state = 2 * 4 * 3 * 4;
  const std::vector<int64_t> given = {4 + 1, 4 + 1, 4, 0}, read = {0, 4, 4 + 1, 4 + 1};
  const std::vector<int64_t> readers = {2, 2, 1, 0}, holders = {0, 1, 2, 2};
  for (int r = 0; r < 4; ++r) {
    const StateCount forward = count(plans.ranks[r], Pass::forward, shape);
    EXPECT_EQ(forward.bytes_sent, given[r] * row * 4 + (r < 3 ? state : 0)) << r;
    EXPECT_EQ(forward.messages, readers[r] + (r < 3 ? 1 : 0)) << r;
    const StateCount back = count(plans.ranks[r], Pass::backward, shape);
    EXPECT_EQ(back.bytes_sent, read[r] * row * 4 + weights + (r > 0 ? state : 0)) << r;
    EXPECT_EQ(back.messages, holders[r] + 1 + (r > 0 ? 1 : 0)) << r;
  }
  // In bf16, histories have half the bytes; their gradients have not.
  RecurrenceProblem narrow = plans.problem;
  narrow.type = DType::bf16;
  EXPECT_EQ(halo_form(narrow, 0, Pass::forward).bytes_sent, 5 * row * 2);
  EXPECT_EQ(halo_form(narrow, 3, Pass::backward).bytes_sent, 5 * row * 4 + weights);
}

TEST(RecurrencePlan, LayoutsThatCutADocumentOftenerAreRefused) {
  for (const auto& [layout, reason] :
       {std::pair{"striped", "under striped rank 0 has every 4th token of document 0"},
        {"dual-chunk-swap",
         "under dual-chunk-swap part 0 of rank 0 continues as part 0 of rank "
         "1 (document 0)"},
        {"zigzag", "under zigzag part 0 of rank 0 continues"}}) {
    const std::string message =
        test::usage_message([&] { Plans(state_schedules().front(), {64}, 4, layout); });
    EXPECT_NE(message.find(reason), std::string::npos) << message;
    EXPECT_NE(message.find("consecutive slots"), std::string::npos) << message;
  }
}

// One document on 3 ranks of a machine that computes 1 FLOP/s and sends at once: the chain waits
// for the first rank's run and one composition, the gather for the slowest summary.
TEST(RecurrencePlan, TimesFollowTheMessages) {
  const StateMachine machine{1, 1e30, 0};
  const Plans chain(test::named(state_schedules(), "state-chain"), {12}, 3);
  const RecurrenceShape& shape = chain.problem.shape;
  const double run = recurrence_flops(Pass::forward, 4, shape);
  const StateTimes times = simulate(chain.ranks, Pass::forward, shape, machine);
  EXPECT_DOUBLE_EQ(times.end[0], run);
  EXPECT_DOUBLE_EQ(times.wait[0], 0);
  const double summary = count(chain.ranks[1], Pass::forward, shape).more_flops;
  EXPECT_DOUBLE_EQ(times.end[1],
                   std::max(run, summary - 2.0 * 4 * 2 * 12) + 2.0 * 4 * 2 * 12 + run);
  EXPECT_GT(times.wait[2], 0);
  const Plans gather(test::named(state_schedules(), "state-gather"), {12}, 3);
  const StateTimes all = simulate(gather.ranks, Pass::forward, shape, machine);
  EXPECT_LT(all.wait[2], times.wait[2]);
}

}  // namespace GYRE_FILE
}  // namespace gyre
