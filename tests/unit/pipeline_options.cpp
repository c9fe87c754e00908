// What gyre-pipeline makes of its options: the plan, what it refuses, and what a dry run says.

#include <gtest/gtest.h>

#include "apps/pipeline/options.hpp"
#include "apps/pipeline/report.hpp"
#include "errors.hpp"
#include "random_model.hpp"

namespace gyre {
namespace GYRE_FILE {

Documents documents_of(const std::vector<int64_t>& lengths) {
  Documents documents;
  documents.vocab_size = test::small_config().vocab_size;
  for (const int64_t length : lengths) documents.offsets.push_back(documents.total() + length);
  documents.tokens.resize(documents.total(), 1);
  return documents;
}

PipelineOptions options_of(int cp, const std::string& layout = "dual-chunk-swap",
                           const std::string& schedule = "ring") {
  PipelineOptions o;
  o.input = "docs.h5";
  o.cp = cp;
  o.layout.name = layout;
  o.schedule.name = schedule;
  return o;
}

/// The plan for a run of the right number of ranks.
ScoringPlan plan_of(const PipelineOptions& o, const Documents& documents) {
  return make_plan(o, test::small_config(), "", documents, o.dp * o.cp * o.tp);
}

void expect_refused(const std::string& message, const PipelineOptions& o, int ranks) {
  test::expect_usage(message, [&] {
    make_plan(o, test::small_config(), "", documents_of({9, 2}), ranks);
  });
}

TEST(MakePlan, LayoutsThatCutSegmentsPadThem) {
  const Documents documents = documents_of({5, 3, 0, 8});
  EXPECT_EQ(plan_of(options_of(2), documents).bins.front().slots(), 8 + 8 + 4);
  EXPECT_EQ(plan_of(options_of(3), documents).bins.front().slots(), 12 + 6 + 6);
  for (const LayoutKind& layout : layout_kinds()) {
    if (layout.chunks_per_rank > 0) continue;
    const ScoringPlan plan = plan_of(options_of(3, layout.name), documents);
    EXPECT_EQ(plan.bins.front().slots(), 16) << layout.name;
    EXPECT_GE(plan.layout_of(plan.bins.front()).layout.padded_slots, 18) << layout.name;
    EXPECT_EQ(plan.capacity, 8192) << layout.name;
  }
  EXPECT_EQ(plan_of(options_of(3), documents).capacity, 8196);
  const ScoringPlan parts = plan_of(options_of(3, "contiguous-documents"), documents);
  EXPECT_EQ(parts.bins.front().slots(), 6 + 3 + 9);
  EXPECT_EQ(parts.capacity, 8193);
}

ModelConfig hybrid() {
  ModelConfig config = test::small_config();
  config.layer_kinds = {{.recurrent = true}, {}};
  config.recurrent = {2, 4, 4, 6, 4};
  return config;
}

TEST(MakePlan, RecurrentLayersHaveALayoutOfTheirOwn) {
  PipelineOptions o = options_of(2);
  const auto message = [&](const ModelConfig& config, int ranks = 2) {
    return test::usage_message([&] { make_plan(o, config, "", documents_of({9, 40}), ranks); });
  };
  const ScoringPlan plan = make_plan(o, hybrid(), "", documents_of({9, 40}), 2);
  EXPECT_EQ(plan.recurrent_layers, 1);
  EXPECT_EQ(plan.masks.size(), 1U);
  EXPECT_EQ(plan.masks.front().layers, 1);
  EXPECT_EQ(plan.layout_of(plan.bins.front()).recurrent.name, "contiguous");
  EXPECT_NE(dry_run_text(plan, hybrid()).find("1 recurrent layers, contiguous, state-gather: send"),
            std::string::npos);
  o.recurrent_layout = "striped";
  EXPECT_NE(
      message(hybrid()).find("--state-schedule state-gather: under striped rank 0 has one in 2 "
                             "tokens"),
      std::string::npos);
  o.recurrent_layout = "zigzag";
  o.state_schedule = "state-chain";
  EXPECT_NE(message(test::small_config())
                .find("--recurrent-layout zigzag: the model has no recurrent layers\n"
                      "  - --state-schedule state-chain: the model has no recurrent layers"),
            std::string::npos);
  o = options_of(1);
  o.tp = 4;
  EXPECT_NE(
      message(hybrid(), 4).find("--tp 4 does not divide the model's linear_num_key_heads = 2"),
      std::string::npos);
  o = options_of(2);
  o.backend.backend = "cuda";
  EXPECT_NE(message(hybrid()).find("1 recurrent layers, which need --backend cpu"),
            std::string::npos);
}

TEST(MakePlan, TheGridTakesTheRanksThatAreLeft) {
  PipelineOptions o = options_of(0);
  o.tp = 2;
  EXPECT_EQ(o.setup(6).grid, (GridShape{1, 3, 2}));
  EXPECT_EQ(o.setup(1).grid, (GridShape{1, 1, 2}));
  o.cp = 5;
  EXPECT_EQ(o.setup(6).grid, (GridShape{1, 5, 2}));
}

TEST(MakePlan, OptionsOfLayoutAndScheduleReachTheSetup) {
  PipelineOptions o = options_of(4, "striped", "all-to-all-ring");
  o.layout.options.stripe = 16;
  o.schedule.options.inner = 2;
  const ScoringSetup setup = o.setup(4);
  EXPECT_EQ(setup.layout->name, "striped");
  EXPECT_EQ(setup.layout_options.stripe, 16);
  EXPECT_EQ(setup.schedule->name, "all-to-all-ring");
  EXPECT_EQ(setup.schedule_options.inner, 2);
  o = options_of(4, "balanced");
  o.layout.options.chunk = 32;
  EXPECT_EQ(o.setup(4).layout_options.chunk, 32);
}

TEST(MakePlan, AllProblemsAtOnce) {
  PipelineOptions o = options_of(2);
  o.tp = 3;
  o.layout.options.stripe = 4;
  o.layout.options.chunk = 8;
  o.schedule.options.inner = 2;
  o.bin = 3;
  Documents documents = documents_of({4});
  documents.vocab_size = 50;
  test::expect_usage(
      "impossible configuration; the nearest grids of this run's ranks: dp=1 cp=2 tp=2 | dp=1 cp=1 "
      "tp=4 | dp=2 cp=2 tp=1\n"
      "  - --tp 3 does not divide the model's num_attention_heads = 8\n"
      "  - --tp 3 does not divide the model's num_key_value_heads = 4\n"
      "  - --tp 3 does not divide the model's intermediate_size = 40\n"
      "  - dp=1 cp=2 tp=3 is 6 ranks, but the run has 4\n"
      "  - --stripe 4: layout dual-chunk-swap does not read it; striped does\n"
      "  - --chunk 8: layout dual-chunk-swap does not read it; balanced and balanced-joint do\n"
      "  - --inner 2: schedule ring does not read it; all-to-all-ring does\n"
      "  - --bin 3 is not a multiple of 2 cp = 4; the nearest is 4\n"
      "  - docs.h5 has tokens of a vocabulary of 50, the model of 37",
      [&] { make_plan(o, test::small_config(), "", documents, 4); });
}

TEST(MakePlan, RefusesWhatTheScheduleOrTheLayoutRefuses) {
  PipelineOptions o = options_of(4, "contiguous", "all-to-all-ring");
  o.schedule.options.inner = 3;
  expect_refused(
      "impossible configuration\n"
      "  - schedule all-to-all-ring: inner groups of 3 do not divide 4 ranks; the nearest that do "
      "are 2 and 4",
      o, 4);
  expect_refused(
      "impossible configuration; the nearest grids of this run's ranks: dp=1 cp=2 tp=1 | dp=2 cp=1 "
      "tp=1 | dp=1 cp=1 tp=2\n"
      "  - dp=1 cp=4 tp=1 is 4 ranks, but the run has 2\n"
      "  - schedule all-to-all-ring: inner groups of 3 do not divide 4 ranks; the nearest that do "
      "are 2 and 4",
      o, 2);
  o = options_of(2, "striped");
  o.layout.options.stripe = int64_t{1} << 31;
  expect_refused(
      "impossible configuration\n"
      "  - the stripe must be 1 to 2147483647 slots, not 2147483648",
      o, 2);
}

TEST(MakePlan, RefusesSizesBeyondItsRange) {
  PipelineOptions o = options_of(2);
  o.bin = int64_t{1} << 31;
  expect_refused(
      "impossible configuration\n"
      "  - --bin 2147483648: at most 2147483644, the int32 range of cu_seqlens",
      o, 2);
}

// By hand, from the model's sizes: 24 hidden, 40 intermediate, 48 padded vocabulary, 2 layers, 8
// heads, 4 KV heads of 8. A rank holds 4096 slots. Per slot it sends keys and values, 2·4·8 floats,
// once a layer, and keeps q, out, kv and stats, 64 + 64 + 64 + 16 floats, and x, h and the partial
// sum, gate and up, and logits, 3·24 + 2·40 + 48. FLOPs: 31728 a token and 4·8·8 a pair and layer.
TEST(DryRun, CountsTheRing) {
  const ScoringPlan plan = plan_of(options_of(2), documents_of({8192}));
  EXPECT_EQ(
      dry_run_text(plan, test::small_config()),
      "# dry run, dp=1 cp=2 tp=1, dual-chunk-swap, ring: nothing was computed\n"
      "#   tokens 8192  slots 8192  bins 1 of 8192  packing 100.0 %  predictions 8191\n"
      "#   FLOPs of a pass 1.744e+10  attention pairs of a head and layer 33558528  imbalance 0.00 "
      "%\n"
      "#   attention sends in a pass, busiest rank 2.097 MB, at most 2 messages; all ranks 4.194 "
      "MB\n"
      "#   memory of a rank: weights 0.1 MiB, activations of the largest bin 5.6 MiB, blocks of "
      "other ranks and copies for messages 1.0 MiB\n");
}

std::string line_with(const std::string& text, const std::string& word) {
  const size_t at = text.find(word), begin = text.rfind('\n', at) + 1;
  return text.substr(begin, text.find('\n', at) - begin);
}

// One document of 8 tokens on cp = 2: the first rank has 10 pairs, the second 26. The padding of
// the row counts as slots. A replica without bins counts as ranks without work.
TEST(DryRun, CountsTheLayout) {
  const auto text = [](const PipelineOptions& o, int64_t length) {
    return dry_run_text(plan_of(o, documents_of({length})), test::small_config());
  };
  PipelineOptions o = options_of(2, "contiguous");
  EXPECT_TRUE(line_with(text(o, 8), "imbalance").ends_with("layer 36  imbalance 44.44 %"));
  o.dp = 2;
  EXPECT_TRUE(line_with(text(o, 8), "imbalance").ends_with("layer 36  imbalance 188.89 %"));
  o = options_of(3, "striped");
  EXPECT_TRUE(line_with(text(o, 8), "slots").starts_with("#   tokens 8  slots 9  bins 1"));
}

TEST(DryRun, TensorParallelRanksSendHalfTheHeadsEach) {
  PipelineOptions o = options_of(2);
  o.tp = 2;
  const std::string text = dry_run_text(plan_of(o, documents_of({8192})), test::small_config());
  EXPECT_EQ(line_with(text, "sends"),
            "#   attention sends in a pass, busiest rank 1.049 MB, at most 2 messages; all ranks "
            "4.194 MB");
}

TEST(DryRun, NothingToDo) {
  for (const LayoutKind& layout : layout_kinds()) {
    const std::string text =
        dry_run_text(plan_of(options_of(2, layout.name), documents_of({})), test::small_config());
    EXPECT_TRUE(line_with(text, "sends").ends_with("rank 0 MB, at most 0 messages; all ranks 0 MB"))
        << text;
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
