// Predictions of recurrent layers: FLOPs of chunks, and times against closed forms.

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <numeric>

#include "errors.hpp"
#include "predict/recurrence_program.hpp"
#include "recurrence_cases.hpp"
#include "sharding/padded_layout.hpp"

namespace gyre {
namespace GYRE_FILE {

constexpr double rate = 1e12, scan = 1e-8, launch = 1e-5;

/// A machine of nodes of `node` ranks with rates of gdn.
MachineModel machine_of(int node, double bytes_per_s, double latency_s) {
  MachineModel machine = flat_machine(1e12, bytes_per_s, latency_s);
  for (const Pass pass : {Pass::forward, Pass::backward})
    machine.recurrence.rates.push_back({"gdn", pass, DType::bf16, launch, scan, rate});
  LinkTier outer = machine.links.front();
  machine.links.front().ranks = node;
  outer.name = "switch";
  outer.bytes_per_s /= 10;
  outer.latency_s *= 3;
  if (node > 0) machine.links.push_back(outer);
  return machine;
}

struct Predicted {
  Predicted(const char* name, const std::vector<int64_t>& lengths, int cp,
            const MachineModel& machine, const char* layout = "contiguous", int64_t convolution = 0,
            GroupPlace place = {})
      : schedule(test::named(state_schedules(), name)),
        placed(offsets_of(lengths), find_layout(layout), options_of(cp)),
        problem{
            &placed.layout, {test::named(recurrence_kinds(), "gdn"), 4, 8, 32, 16}, DType::bf16} {
    problem.shape.convolution = convolution;
    why_not = schedule.why_not(problem);
    if (why_not.empty())
      passes = predict(PredictedRecurrence{schedule, problem, "gdn", place},
                       {Pass::forward, Pass::backward}, machine);
  }
  static LayoutOptions options_of(int cp) {
    LayoutOptions options;
    options.cp = cp;
    options.stripe = options.chunk = 8;
    return options;
  }
  static std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
    std::vector<int64_t> offsets{0};
    for (const int64_t length : lengths) offsets.push_back(offsets.back() + length);
    return offsets;
  }
  double seconds(Pass pass) const { return passes.at(pass == Pass::forward ? 0 : 1).seconds; }

  const StateSchedule& schedule;
  PaddedLayout placed;
  RecurrenceProblem problem;
  std::string why_not;
  std::vector<PassPrediction> passes;
};

// K = V = 128, a head: the spec's figures. A layer's forward is 0.18 MFLOP a token; a summary, S and
// M at once, 0.73 of that, and its backward 0.21 of the layer's.
TEST(RecurrencePrediction, FlopsOfChunksAreThoseOfTheirProducts) {
  const RecurrenceShape delta(test::named(recurrence_kinds(), "gdn"), 1, 1, 128, 128);
  const RecurrenceShape plain(test::named(recurrence_kinds(), "gla"), 1, 1, 128, 128);
  StatePlan plan;
  plan.parts = {{.tokens = 10}};
  const auto work = [&](const StateStep& step, Pass pass, const RecurrenceShape& shape) {
    return chunked_work(step, plan, pass, shape);
  };
  const StateStep run = state_step::Run{.part = 0};
  const StateStep sum = state_step::Summarize{.part = 0};
  const StateStep back = state_step::SummarizeBack{.part = 0};
  EXPECT_EQ(work(run, Pass::forward, delta).flops, 10 * 180224.0);
  EXPECT_EQ(work(run, Pass::backward, delta).flops, 10 * 475136.0);
  EXPECT_EQ(work(sum, Pass::forward, delta).flops, 10 * 131072.0);
  EXPECT_EQ(work(back, Pass::backward, delta).flops, 10 * 98304.0);
  EXPECT_EQ(work(run, Pass::forward, plain).flops, 10 * (4 * 16384 + 128 * 256.0));
  EXPECT_EQ(work(run, Pass::backward, plain).flops, 10 * (10 * 16384 + 128 * 5 * 128.0));
  EXPECT_EQ(work(sum, Pass::forward, plain).flops, 10 * 32768.0);
  EXPECT_EQ(work(run, Pass::forward, delta).scanned, 10);
  EXPECT_EQ(work(run, Pass::backward, delta).scanned, 20);
  EXPECT_EQ(work(sum, Pass::forward, delta).scanned, 10);
  EXPECT_EQ(work(state_step::Summarize{}, Pass::forward, delta).scanned, 0);
  const StateStep compose = state_step::Compose{0, 0, {{0, 0}}};
  EXPECT_EQ(work(compose, Pass::forward, delta).flops, 2.0 * 128 * 128 * 128);
  EXPECT_EQ(work(compose, Pass::forward, delta).scanned, 0);
  EXPECT_EQ(work(state_step::Convolve{{0}}, Pass::forward, delta).flops, 0);
}

// What heads are divided into is computed by each rank: 4 ranks have a quarter of the FLOPs, and all
// tokens to scan.
TEST(RecurrencePrediction, AShareOfTheHeadsIsScannedAsLongAsAllOfThem) {
  const MachineModel machine = machine_of(0, LinkTier::unlimited, 0);
  const Predicted one("head-exchange", {256}, 1, machine), four("head-exchange", {256}, 4, machine);
  for (const auto& [pass, scans] : {std::pair{Pass::forward, 1}, {Pass::backward, 2}}) {
    const double fixed = launch + scans * 256 * scan;
    EXPECT_NEAR(4 * (four.seconds(pass) - fixed), one.seconds(pass) - fixed, 1e-12);
    EXPECT_GT(one.seconds(pass), fixed);
  }
}

// Documents of a rank are one call: a launch, the longest scan, and the FLOPs of all.
TEST(RecurrencePrediction, DocumentsOfARankAreScannedAtOnce) {
  const MachineModel machine = machine_of(0, LinkTier::unlimited, 0);
  const Predicted all("state-gather", {256, 128, 0, 64}, 1, machine);
  const Predicted one("state-gather", {448}, 1, machine);
  for (const auto& [pass, scans] : {std::pair{Pass::forward, 1}, {Pass::backward, 2}})
    EXPECT_NEAR(one.seconds(pass) - all.seconds(pass), scans * (448 - 256) * scan, 1e-12);
}

// Of 255 tokens, rank 0 of 2 packs q, k, v, g and beta of its 128 in all heads, and unpacks those of
// 255 in half of the heads; the output goes home the other way. A byte is read and written.
TEST(RecurrencePrediction, HeadsAreCopiedOutAndIn) {
  MachineModel machine = machine_of(0, LinkTier::unlimited, 0);
  const double without = Predicted("head-exchange", {255}, 2, machine).seconds(Pass::forward);
  machine.copy_bytes_per_s = 1e9;
  const Predicted with("head-exchange", {255}, 2, machine);
  const double inputs = 2 * (2 * 4 * 32 + 8 * 16) + 4 * (8 + 8), outputs = 2 * 8 * 16;
  EXPECT_NEAR(with.seconds(Pass::forward) - without, 2 * (128 + 127.5) * (inputs + outputs) / 1e9,
              1e-12);
  EXPECT_NEAR(with.passes.front().copies_most, with.seconds(Pass::forward) - without, 1e-12);
}

// Forward, a convolution reads x of two bytes and writes y of four; backward, it also reads x and
// dy and writes ds, then reads ds and writes dx.
TEST(RecurrencePrediction, AConvolutionTakesItsBytes) {
  MachineModel machine = machine_of(0, LinkTier::unlimited, 0);
  machine.decoder.elementwise_bytes_per_s = 1e9;
  const Predicted with("state-gather", {256}, 1, machine, "contiguous", 4);
  const Predicted without("state-gather", {256}, 1, machine);
  const double channels = 2 * 4 * 32 + 8 * 16;
  for (const auto& [pass, bytes] : {std::pair{Pass::forward, 6}, {Pass::backward, 10 + 6}})
    EXPECT_NEAR(with.seconds(pass) - without.seconds(pass), 256 * channels * bytes / 1e9, 1e-12);
}

/// Seconds of a layer's run, a summary or a composition of a part of one of 4 ranks of 64 tokens.
double seconds_of(const StateStep& step, Pass pass, const RecurrenceShape& shape) {
  StatePlan plan;
  plan.parts = {{.tokens = 64}};
  const ChunkedWork work = chunked_work(step, plan, pass, shape);
  return (work.scanned > 0 ? launch : 0) + work.scanned * scan + work.flops / rate;
}

// One document on 4 ranks. Forward, the last rank of a gather has a summary, the all-gather of 3
// blocks, 2 compositions and its run; that of a chain waits for the first rank's run, or the second's
// summary if it is longer, and for 3 messages with 2 compositions.
TEST(RecurrencePrediction, TimesAreThoseOfTheClosedForms) {
  const double bytes_per_s = 1e9, latency = 1e-6;
  const MachineModel machine = machine_of(0, bytes_per_s, latency);
  const RecurrenceShape shape(test::named(recurrence_kinds(), "gdn"), 4, 8, 32, 16);
  const double state = 8 * 32 * 16 * 4, map = 8 * 32 * 32 * 4;
  const double run = seconds_of(state_step::Run{.part = 0}, Pass::forward, shape);
  const double summary = seconds_of(state_step::Summarize{.part = 0}, Pass::forward, shape);
  const double compose = 2.0 * 8 * 32 * 32 * 16 / rate;
  const auto tree = [&](double bytes) { return 2 * latency + 3 * bytes / bytes_per_s; };
  EXPECT_NEAR(Predicted("state-gather", {256}, 4, machine).seconds(Pass::forward),
              summary + tree(map + state) + 2 * compose + run, 1e-12);
  EXPECT_NEAR(Predicted("state-chain", {256}, 4, machine).seconds(Pass::forward),
              std::max(run + latency + state / bytes_per_s, summary) +
                  2 * (compose + latency + state / bytes_per_s) + run,
              1e-12);
  const double run_back = seconds_of(state_step::Run{.part = 0}, Pass::backward, shape);
  const double back = seconds_of(state_step::SummarizeBack{.part = 0}, Pass::backward, shape);
  EXPECT_NEAR(Predicted("state-gather", {256}, 4, machine).seconds(Pass::backward),
              back + tree(state) + 2 * compose + run_back, 1e-12);
}

// 8 ranks that compute at once, and messages that take a second: 7 of a chain follow one another; a
// scan has 3 steps, and so has a gather of little.
TEST(RecurrencePrediction, AScanHasAsManyStepsAsTheLogarithmOfRanks) {
  MachineModel machine = machine_of(0, LinkTier::unlimited, 1);
  for (RecurrenceRate& one : machine.recurrence.rates) one.launch_s = one.scan_s = 0;
  for (const auto& [name, seconds] :
       {std::pair{"state-chain", 7}, {"state-gather", 3}, {"state-scan", 3}})
    for (const Pass pass : {Pass::forward, Pass::backward})
      EXPECT_NEAR(Predicted(name, {64}, 8, machine).seconds(pass), seconds, 1e-3) << name;
}

// A gather's summary may have a rate of its own; a layer keeps its rate.
TEST(RecurrencePrediction, SummariesHaveTheirRate) {
  MachineModel machine = machine_of(0, 1e9, 1e-6);
  const Predicted before("state-gather", {256}, 4, machine);
  for (RecurrenceRate& one : machine.recurrence.rates) one.summary_flops_per_s = rate / 3;
  const Predicted behind("state-gather", {256}, 4, machine);
  const double summary = 64 * 8 * (4.0 * 32 * 16 + 4 * 32 * 32), back = 64 * 8 * 6.0 * 32 * 16;
  EXPECT_NEAR(behind.seconds(Pass::forward) - before.seconds(Pass::forward), 2 * summary / rate,
              1e-12);
  EXPECT_NEAR(behind.seconds(Pass::backward) - before.seconds(Pass::backward), 2 * back / rate,
              1e-12);
}

// In nodes of 2, the middle message of a chain takes the slower link, and a gather's latencies are
// those of the outer tier.
TEST(RecurrencePrediction, MessagesTakeTheLinksOfTheirTier) {
  const MachineModel flat = machine_of(0, 1e9, 1e-6), nodes = machine_of(2, 1e9, 1e-6);
  const double state = 8 * 32 * 16 * 4;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const Predicted chain("state-chain", {256}, 4, nodes);
    EXPECT_NEAR(chain.seconds(pass) - Predicted("state-chain", {256}, 4, flat).seconds(pass),
                2e-6 + 9 * state / 1e9, 1e-12);
    const std::vector<double>& sent = chain.passes.at(pass == Pass::forward ? 0 : 1).bytes_by_tier;
    EXPECT_EQ(sent, (std::vector<double>{2 * state, state}));
  }
}

// Every second rank of nodes of 4 lies as all ranks of nodes of 2 do.
TEST(RecurrencePrediction, RanksThatShareHeadsPutNeighboursIntoOtherNodesEarlier) {
  const MachineModel twos = machine_of(2, 1e9, 1e-6), fours = machine_of(4, 1e9, 1e-6);
  for (const StateSchedule& schedule : state_schedules()) {
    const Predicted all(schedule.name.c_str(), {256}, 4, twos);
    const Predicted others(schedule.name.c_str(), {256}, 4, fours, "contiguous", 0, {0, 2});
    for (const Pass pass : {Pass::forward, Pass::backward})
      EXPECT_EQ(all.seconds(pass), others.seconds(pass)) << schedule.name;
    EXPECT_EQ(all.passes.front().bytes_by_tier, others.passes.front().bytes_by_tier);
    EXPECT_GT(all.passes.front().bytes_by_tier[1], 0);
  }
}

RC_GTEST_PROP(RecurrencePrediction, BytesAndMessagesAreThoseOfTheClosedForms, ()) {
  const auto lengths = *rc::gen::nonEmpty(
      rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 40)));
  const int cp = *rc::gen::inRange(1, 9);
  const int64_t convolution = *rc::gen::element<int64_t>(0, 4);
  const MachineModel machine = machine_of(2, 1e9, 1e-6);
  int compared = 0;
  for (const StateSchedule& schedule : state_schedules())
    for (const LayoutKind& layout : layout_kinds()) {
      const Predicted p(schedule.name.c_str(), lengths, cp, machine, layout.name.c_str(),
                        convolution);
      for (const PassPrediction& of_pass : p.passes) {
        int64_t bytes = 0, most = 0, messages = 0;
        for (int rank = 0; rank < cp; ++rank) {
          const StateForm form = closed_form(schedule, p.problem, rank, of_pass.pass);
          bytes += form.bytes_sent;
          most = std::max(most, form.bytes_sent);
          messages = std::max(messages, form.messages);
        }
        RC_ASSERT(of_pass.bytes_most == most);
        RC_ASSERT(of_pass.messages_most == messages);
        // Halves of an all-reduce are blocks of whole bytes.
        const double sent =
            std::accumulate(of_pass.bytes_by_tier.begin(), of_pass.bytes_by_tier.end(), 0.0);
        RC_ASSERT(std::abs(sent - static_cast<double>(bytes)) <= 2.0 * cp * cp);
        RC_ASSERT(of_pass.pairs == p.placed.real.back() * p.problem.shape.value_heads);
        ++compared;
      }
    }
  RC_ASSERT(compared > 0);
}

TEST(RecurrencePrediction, AKindWithoutARateIsRefused) {
  MachineModel machine = machine_of(0, 1e9, 0);
  machine.recurrence.rates.pop_back();
  EXPECT_EQ(machine.recurrence.why_not("gdn", Pass::forward, DType::bf16), "");
  EXPECT_EQ(test::usage_message([&] { Predicted("state-gather", {256}, 4, machine); }),
            "no recurrence gdn bwd of bf16; the machine has gdn fwd of bf16");
  machine.recurrence.rates.clear();
  EXPECT_EQ(machine.recurrence.why_not("gdn", Pass::forward, DType::bf16),
            "the machine has no 'recurrences', which recurrent layers need");
}

}  // namespace GYRE_FILE
}  // namespace gyre
