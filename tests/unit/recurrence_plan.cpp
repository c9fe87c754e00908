// Plans of schedules of states, for all ranks: what each rank computes, sends and is sent, on
// random documents, and in time.

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "errors.hpp"
#include "predict/recurrence_program.hpp"
#include "recurrence/convolution_stage.hpp"
#include "recurrence/halo.hpp"
#include "recurrence/schedules/schedule.hpp"
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
        const char* layout = "contiguous", const char* kind = "gdn", int64_t convolution = 0)
      : Plans(schedule_, lengths, find_layout(layout), of_ranks(cp), kind, convolution) {}
  Plans(const StateSchedule& schedule_, const std::vector<int64_t>& lengths,
        const LayoutKind& layout, const LayoutOptions& options, const char* kind,
        int64_t convolution)
      : schedule(schedule_),
        placed(offsets_of(lengths), layout, options),
        problem{&placed.layout, {test::named(recurrence_kinds(), kind), 2, 4, 4, 3}, DType::bf16} {
    problem.shape.convolution = convolution;
    why_not = schedule.why_not(problem);
    for (int r = 0; why_not.empty() && r < options.cp; ++r)
      ranks.push_back(plan_rank(schedule, problem, r));
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
  std::string why_not;
  std::vector<StatePlan> ranks;
};

const StateSchedule& schedule_of(const char* name) {
  return test::named(state_schedules(), name);
}

void check_plans(const Plans& plans, Pass pass) {
  int64_t sent = 0, received = 0, computed = 0;
  double flops = 0;
  const auto cp = static_cast<int>(plans.ranks.size());
  for (int r = 0; r < cp; ++r) {
    std::map<int, int> runs;
    for (const Run& run : plans.steps<Run>(r, pass)) ++runs[run.part];
    RC_ASSERT(runs.size() == plans.ranks[r].parts.size());
    for (const auto& [part, times] : runs) RC_ASSERT(times == 1);
    const StateCount counted = count(plans.ranks[r], pass, plans.problem.shape);
    const StateForm form = closed_form(plans.schedule, plans.problem, r, pass);
    RC_ASSERT(counted.messages == form.messages);
    RC_ASSERT(counted.bytes_sent == form.bytes_sent);
    sent += counted.bytes_sent;
    received += counted.bytes_received;
    computed += counted.tokens;
    flops += counted.flops;
  }
  RC_ASSERT(sent == received);
  const int64_t tokens = plans.placed.real.back();
  RC_ASSERT(computed == tokens * plans.problem.shape.value_heads);
  const double expected = recurrence_flops(pass, tokens, plans.problem.shape) +
                          convolution_flops(pass, tokens, plans.problem.shape);
  RC_ASSERT(std::abs(flops - expected) <= 1e-12 * expected);
  MachineModel machine;
  machine.recurrence.rates = {{"kda", pass, DType::bf16, 0, 0, 1}};
  // Throws if a rank waits forever.
  times_of(plans.ranks, pass, {plans.problem.shape, "kda", plans.schedule.name, machine});
}

RC_GTEST_PROP(RecurrencePlan, EveryPartRunsOnceAndEveryMessageArrives, ()) {
  const auto lengths = *rc::gen::nonEmpty(
      rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 20)));
  LayoutOptions options = of_ranks(*rc::gen::inRange(1, 9));
  options.stripe = options.chunk = *rc::gen::inRange(2, 6);
  const int64_t convolution = *rc::gen::inRange(0, 12);
  for (const StateSchedule& schedule : state_schedules())
    for (const LayoutKind& layout : layout_kinds()) {
      const Plans plans(schedule, lengths, layout, options, "kda", convolution);
      if (!plans.why_not.empty()) continue;
      for (const Pass pass : {Pass::forward, Pass::backward}) check_plans(plans, pass);
    }
}

// Neighbours in a chain are on different ranks, and every token is in one part.
RC_GTEST_PROP(RecurrencePlan, PartsAreWhatTheLayoutSays, ()) {
  const auto lengths = *rc::gen::nonEmpty(
      rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 20)));
  LayoutOptions options = of_ranks(*rc::gen::inRange(1, 9));
  options.stripe = options.chunk = *rc::gen::inRange(2, 6);
  const auto offsets = Plans::offsets_of(lengths);
  for (const LayoutKind& kind : layout_kinds()) {
    const PaddedLayout placed(offsets, kind, options);
    const StateParts parts(placed.layout);
    for (const auto& [document, chain] : parts.of_document) {
      int64_t position = 0;
      for (size_t i = 0; i < chain.size(); ++i) {
        const StatePart& part = parts.of_rank[chain[i].rank][chain[i].part];
        RC_ASSERT(part.document == document && part.start == position);
        RC_ASSERT(part.place == static_cast<int>(i));
        RC_ASSERT(part.continued() == (i > 0));
        RC_ASSERT(part.continues() == (i + 1 < chain.size()));
        if (i > 0) RC_ASSERT(chain[i].rank != chain[i - 1].rank);  // RC_ASSERT(a || b) reads both
        const std::vector<int32_t> slots = shard_index(placed.layout, chain[i].rank);
        for (int64_t t = 0; t < part.tokens; ++t)
          RC_ASSERT(slots[part.row + t] == placed.padded[document] + position + t);
        position += part.tokens;
      }
      RC_ASSERT(position == lengths[document]);
    }
  }
}

std::vector<int> ranks_of(const std::vector<PartOfRank>& chain) {
  std::vector<int> ranks;
  for (const PartOfRank& at : chain) ranks.push_back(at.rank);
  return ranks;
}

TEST(RecurrencePlan, ChainsAreThePartsOfADocument) {
  // tokens   0 0 0 0 | 0 0 0 0 | 0 0 1 1 | 1 2 2 2
  const Plans contiguous(state_schedules().front(), {10, 3, 3}, 4);
  EXPECT_EQ(ranks_of(contiguous.problem.parts.of_document.at(0)), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(ranks_of(contiguous.problem.parts.of_document.at(1)), (std::vector<int>{2, 3}));
  EXPECT_EQ(ranks_of(contiguous.problem.parts.of_document.at(2)), (std::vector<int>{3}));
  EXPECT_TRUE(contiguous.problem.parts.of_rank[1][0].passes_through());
  EXPECT_FALSE(contiguous.problem.parts.of_rank[2][0].passes_through());
  // chunks of 2 tokens, of 12 and of 5: ranks 0 1 2 2 1 0; those of rank 2 are one part
  const Plans swapped(state_schedules().front(), {12, 5}, 3, "dual-chunk-swap");
  EXPECT_EQ(ranks_of(swapped.problem.parts.of_document.at(0)), (std::vector<int>{0, 1, 2, 1, 0}));
  EXPECT_EQ(swapped.problem.parts.of_rank[2][0].tokens, 4);
  EXPECT_EQ(ranks_of(swapped.problem.parts.of_document.at(1)), (std::vector<int>{0, 1, 2, 1}));
}

// A rank whose last document ends with it, and one without tokens, send the identity.
TEST(RecurrencePlan, WhatDoesNotContinueIsTheIdentity) {
  // tokens   0 0 0 | 0 1 1 | 2 2 2 | 2 . .
  const Plans plans(schedule_of("state-gather"), {4, 2, 4}, 4);
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
  const StateParts parts(placed.layout);
  for (const HistoryPiece& piece : history_pieces(parts, width)) {
    const StatePart& from = parts.at({piece.from, piece.from_part});
    for (int64_t i = 0; i < piece.rows; ++i) {
      RC_ASSERT(piece.row + i < from.tokens);
      RC_ASSERT(got.emplace(std::tuple(piece.to, piece.to_part, piece.at + i),
                            std::pair(from.document, from.start + piece.row + i))
                    .second);
    }
  }
  for (int r = 0; r < cp; ++r) {
    const std::vector<StatePart>& own = parts.of_rank.at(r);
    for (size_t p = 0; p < own.size(); ++p) {
      const int64_t start = own[p].start, rows = history_rows(own[p], width);
      RC_ASSERT(rows == std::min(start, width - 1));
      for (int64_t i = 0; i < rows; ++i)
        want[{r, static_cast<int>(p), i}] = {own[p].document, start - rows + i};
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

int64_t sent(const Plans& plans, int rank, Pass pass) {
  return count(plans.ranks.at(rank), pass, plans.problem.shape).bytes_sent;
}

// H_v d_k (d_k + d_v) 4 bytes a map and its state, H_v d_k d_v 4 a state; H_v 4, d_k 4, d_v 3.
constexpr int64_t state_bytes = 4 * 4 * 3 * 4, map_bytes = 4 * 4 * 4 * 4;

TEST(RecurrencePlan, ClosedFormsAreThoseOfThePages) {
  const Plans gather(schedule_of("state-gather"), {16}, 4);
  EXPECT_EQ(sent(gather, 0, Pass::forward), 3 * (map_bytes + state_bytes));
  EXPECT_EQ(sent(gather, 0, Pass::backward), 3 * state_bytes);
  const Plans chain(schedule_of("state-chain"), {16}, 4);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(sent(chain, r, Pass::forward), r < 3 ? state_bytes : 0);
    EXPECT_EQ(sent(chain, r, Pass::backward), r > 0 ? state_bytes : 0);
  }
}

// 16 tokens on 4 ranks, a convolution of 6: histories of 4 tokens, then of 5, on two ranks. Rows have
// 2 · 1 · 4 + 2 · 3 channels.
TEST(RecurrencePlan, ClosedFormsOfAConvolution) {
  const Plans plans(test::named(state_schedules(), "state-chain"), {16}, 4, "contiguous", "gdn", 6);
  const RecurrenceShape& shape = plans.problem.shape;
  const int64_t row = 28, weights = 2 * 3 * row * 6 * 4 / 4, state = 4 * 4 * 3 * 4;
  const std::vector<int64_t> given = {4 + 1, 4 + 1, 4, 0}, read = {0, 4, 4 + 1, 4 + 1};
  const std::vector<int64_t> readers = {2, 2, 1, 0}, holders = {0, 1, 2, 2};
  for (int r = 0; r < 4; ++r) {
    const StateCount forward = count(plans.ranks[r], Pass::forward, shape);
    EXPECT_EQ(forward.bytes_sent, given[r] * row * 2 + (r < 3 ? state : 0)) << r;
    EXPECT_EQ(forward.messages, readers[r] + (r < 3 ? 1 : 0)) << r;
    const StateCount back = count(plans.ranks[r], Pass::backward, shape);
    EXPECT_EQ(back.bytes_sent, read[r] * row * 4 + weights + (r > 0 ? state : 0)) << r;
    EXPECT_EQ(back.messages, holders[r] + 1 + (r > 0 ? 1 : 0)) << r;
  }
  // In f32, histories have twice the bytes of bf16; their gradients are always in f32.
  RecurrenceProblem wide = plans.problem;
  wide.type = DType::f32;
  EXPECT_EQ(halo_form(wide, 0, Pass::forward).bytes_sent, 5 * row * 4);
  EXPECT_EQ(halo_form(wide, 3, Pass::backward).bytes_sent, 5 * row * 4 + weights);
  // Ranks that exchange heads have the 16 tokens of all ranks in 14 channels: results and their
  // gradients, and gradients of the last 5; and the gradient of all weights.
  const Plans heads(schedule_of("head-exchange"), {16}, 2, "contiguous", "gdn", 6);
  EXPECT_EQ(convolution_bytes(heads.ranks[1], 8, shape), (2 * 16 + 5) * 4 * 14 + 6 * 4 * row);
}

// Two slots a rank: the last rank has one part, and sends an identity beside it.
TEST(RecurrencePlan, ARankWithTwoPartsSendsTwoMaps) {
  const Plans gather(schedule_of("state-gather"), {32}, 4, "dual-chunk-swap");
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(sent(gather, r, Pass::forward), 2 * 3 * (map_bytes + state_bytes));
    EXPECT_EQ(sent(gather, r, Pass::backward), 2 * 3 * state_bytes);
  }
  const auto sums = gather.steps<Summarize>(3, Pass::forward);
  EXPECT_EQ(sums.at(0).part, 0);
  EXPECT_EQ(sums.at(1).part, -1);
  // From the state before its first part, rank 1 goes on over the parts of ranks 1, 2 and 3.
  const auto composed = gather.steps<Compose>(1, Pass::forward);
  EXPECT_EQ(composed.at(0).terms.size(), 1U);
  EXPECT_EQ(composed.at(1).start, composed.at(0).into);
  EXPECT_EQ(composed.at(1).terms.size(), 4U);
  const Plans chain(schedule_of("state-chain"), {32}, 4, "dual-chunk-swap");
  EXPECT_EQ(sent(chain, 0, Pass::forward), state_bytes);
  EXPECT_EQ(sent(chain, 1, Pass::forward), 2 * state_bytes);
  EXPECT_EQ(sent(chain, 3, Pass::backward), state_bytes);
}

// The part at place i of n sends to i + 1, i + 2, i + 4, ...: a map if it begins behind the chain's
// begin, else a state.
TEST(RecurrencePlan, AScanSendsMapsUntilTheyBeginWithTheDocument) {
  const Plans scan(schedule_of("state-scan"), {24}, 6);
  //                         0        1        2        3        4        5
  const int states[] = {3, 3, 2, 2, 1, 0}, maps[] = {0, 1, 2, 2, 1, 0};
  for (int r = 0; r < 6; ++r) {
    EXPECT_EQ(sent(scan, r, Pass::forward), states[r] * state_bytes + maps[r] * map_bytes) << r;
    EXPECT_EQ(sent(scan, r, Pass::backward), sent(scan, 5 - r, Pass::forward)) << r;
    EXPECT_EQ(count(scan.ranks[r], Pass::forward, scan.problem.shape).messages, states[r]);
  }
  // A document that begins on a rank begins a chain: two of two parts need one step.
  const Plans cut(schedule_of("state-scan"), {6, 2, 8}, 4);
  for (int r = 0; r < 4; ++r)
    EXPECT_EQ(sent(cut, r, Pass::forward), r % 2 == 0 ? state_bytes : 0) << r;
}

// Tokens of a rank, (cp - 1) / cp of their rows: bf16 but for g and beta, which are f32.
TEST(RecurrencePlan, HeadsSendRowsOfTokens) {
  const Plans heads(schedule_of("head-exchange"), {16}, 2, "striped");
  const int64_t in = 2 * (2 * 4 + 2 * 4 + 4 * 3) + 4 * (4 + 4), out = 2 * 4 * 3;
  for (int r = 0; r < 2; ++r)
    for (const Pass pass : {Pass::forward, Pass::backward})
      EXPECT_EQ(sent(heads, r, pass), 8 * (in + out) / 2) << r;
  // Of 5 tokens, rank 1 has 2: it sends their inputs, and the results of the other 3.
  const Plans few(schedule_of("head-exchange"), {5}, 2, "contiguous", "ssd");
  const int64_t tokens_in = 2 * (2 * 4 + 2 * 4 + 4 * 3) + 4 * 4;
  EXPECT_EQ(sent(few, 1, Pass::forward), 2 * tokens_in / 2 + 3 * out / 2);
  EXPECT_EQ(sent(few, 0, Pass::backward), 3 * out / 2 + 2 * tokens_in / 2);
}

TEST(RecurrencePlan, WhatCannotBeDoneIsRefused) {
  const auto message = [](const char* schedule, const char* layout, int cp) {
    return test::usage_message([&] {
      const Plans plans(schedule_of(schedule), std::vector<int64_t>(40, 16), cp, layout);
      plan_rank(plans.schedule, plans.problem, 0);
    });
  };
  EXPECT_NE(message("state-chain", "striped", 4)
                .find("under striped rank 0 has one in 4 tokens of document 0; states pass between "
                      "runs of consecutive tokens"),
            std::string::npos);
  EXPECT_NE(
      message("state-scan", "dual-chunk-swap", 4)
          .find("under dual-chunk-swap rank 0 has 80 parts of documents that go on elsewhere; "
                "at most 64"),
      std::string::npos);
  EXPECT_NE(message("head-exchange", "contiguous", 3).find("nearest that divide them: 2"),
            std::string::npos);
}

}  // namespace GYRE_FILE
}  // namespace gyre
