// What gyre-attention makes of its options, of the scores of its inputs and of its measurements.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <utility>

#include "apps/attention/options.hpp"
#include "apps/attention/report.hpp"
#include "apps/attention/setup.hpp"
#include "attention/plan_size.hpp"
#include "errors.hpp"
#include "io/schemas/attention_file.hpp"

namespace gyre {
namespace GYRE_FILE {

TEST(AttentionOptions, FillsInWhatFollows) {
  AttentionOptions o;
  o.dtype = "bf16";
  o.generate = "dist=fixed";
  check_options(o, 6);
  EXPECT_EQ(o.cp, 6);
  EXPECT_EQ(o.wire_dkv, "bf16");
  EXPECT_EQ(o.capacity, 16384);
  EXPECT_EQ(o.check, "last");
  AttentionOptions emulated;
  emulated.compute = "tflops=1";
  check_options(emulated, 6);
  EXPECT_EQ(emulated.check, "none");
}

TEST(AttentionOptions, SweepsWholeSizesOnce) {
  AttentionOptions o;
  EXPECT_EQ(o.sweep.sizes(), std::vector<int64_t>{4096});
  o.sweep.min = 2;
  o.sweep.max = 7;
  o.sweep.factor = 1.3;
  EXPECT_EQ(o.sweep.sizes(), (std::vector<int64_t>{2, 3, 4, 6}));
  o.sweep.max = 2;
  EXPECT_EQ(o.sweep.sizes(), std::vector<int64_t>{2});
  o.sweep.step = 3;
  o.sweep.max = 10;
  EXPECT_EQ(o.sweep.sizes(), (std::vector<int64_t>{2, 5, 8}));
}

TEST(AttentionOptions, WhatIsImpossibleIsListed) {
  using O = AttentionOptions;
  for (
      const auto& [problems, change] : std::vector<std::pair<std::string, std::function<void(O&)>>>{
          {"  - --max 10 needs --min\n"
           "  - --heads 7 is not a multiple of --kv-heads 3; the nearest is 6\n"
           "  - --window 4 needs --mask causal\n"
           "  - --cp 5 in a run of 2 ranks; --explain and --replay take any",
           [](O& o) {
             o.heads = 7, o.kv_heads = 3, o.cp = 5, o.sweep.max = 10;
             o.mask.window = 4, o.mask.mask = "full";
           }},
          {"  - --step 5 needs --min\n"
           "  - one of --step and --factor, not both\n"
           "  - --resume leaves rows out; --output and --trace need theirs: run them by themselves",
           [](O& o) {
             o.sweep.step = 5, o.sweep.factor = 3;
             o.report.resume = "finished", o.trace = "t.json";
           }},
          // Nothing that is given is ignored.
          {"  - --shared-key-dim 16: heads of keys have 16 elements; at most 15 can be shared",
           [](O& o) { o.head_dim = o.shared_key_dim = 16; }},
          {"  - --tokens, --min and --batch go with sequences, not with --input or --gen",
           [](O& o) { o.generate = "dist=fixed", o.sweep.tokens = 5; }},
          {"  - --trace goes with a run, not with --explain",
           [](O& o) { o.explain = true, o.trace = "x.json"; }},
          {"  - --svg, --tflops, --gbps and --latency-us go with --explain",
           [](O& o) { o.latency_us = 0; }},
          // 1.01^n = 2^20 takes 1393.2 steps; 99 steps of 1.1503 do it.
          {"  - --factor 1.01 makes 1394 sizes, and at most 100 are run; the smallest that works "
           "is 1.1503",
           [](O& o) { o.sweep.min = 1, o.sweep.max = 1 << 20, o.sweep.factor = 1.01; }},
          {"  - --step 1000 makes 1049 sizes, and at most 100 are run; the smallest that works is "
           "10486",
           [](O& o) { o.sweep.min = 1, o.sweep.max = 1 << 20, o.sweep.step = 1000; }}}) {
    O o;
    change(o);
    test::expect_usage("impossible configuration\n" + problems, [&] { check_options(o, 2); });
  }
}

TEST(WorkloadLayout, WeighsPairsByTheMask) {
  AttentionWorkload workload;
  workload.offsets = {0, 64};
  LayoutOptions options;
  options.cp = 2;
  options.chunk = 8;
  const auto starts_of_rank_0 = [&](const char* mask) {
    workload.mask = MaskOptions{mask, 0}.of(std::vector<int64_t>{64});
    std::vector<int64_t> starts;
    const WorkloadLayout placed(workload, find_layout("balanced"), options);
    for (const SlotRun& run : placed.layout.shard(0).runs) starts.push_back(run.start.value());
    return starts;
  };
  // Chunks of equal cost are dealt in turn, those of a causal mask by descending cost.
  EXPECT_EQ(starts_of_rank_0("chunked,chunk=8"), (std::vector<int64_t>{0, 16, 32, 48}));
  EXPECT_NE(starts_of_rank_0("causal"), (std::vector<int64_t>{0, 16, 32, 48}));
}

TEST(AttentionOptions, SweepsOfAtMostAHundredSizes) {
  AttentionOptions o;
  o.sweep.min = 1;
  o.sweep.max = 1 << 20;
  o.sweep.factor = 1.1504;
  check_options(o, 2);
  EXPECT_LE(o.sweep.sizes().size(), 100U);
  o.sweep.factor = 2;
  o.sweep.step = 10486;
  check_options(o, 2);
  EXPECT_EQ(o.sweep.sizes().size(), 100U);
}

/// q and k are `size` everywhere.
class ConstantRows final : public TensorRows {
 public:
  explicit ConstantRows(float size) : size_(size) {}
  void row(InputTensor tensor, int64_t token, std::span<float> to) const override {
    (void)tensor;
    (void)token;
    std::fill(to.begin(), to.end(), size_);
  }

 private:
  float size_;
};

TEST(ScoreSize, IsThatOfTheInputsAndAtLeastOne) {
  AttentionOptions o;
  o.head_dim = 16;
  const AttentionWorkload problem = generated_workload(o, 100);
  // <q, k> / sqrt(16) of rows of 3 is 16 · 9 / 4.
  EXPECT_DOUBLE_EQ(sampled_score_size(problem, ConstantRows(3)), 36);
  EXPECT_DOUBLE_EQ(sampled_score_size(problem, ConstantRows(0.1F)), 1);
  EXPECT_NEAR(sampled_score_size(problem, *random_rows(problem, 1)), 1, 0.2);
  EXPECT_DOUBLE_EQ(sampled_score_size(generated_workload(o, 0), ConstantRows(3)), 1);
}

/// Rows of q and k are 0 but in [begin, end) of k and wherever q reads, where all elements are
/// `size`.
class KeysOfOneSize final : public TensorRows {
 public:
  KeysOfOneSize(int64_t begin, int64_t end, float size) : begin_(begin), end_(end), size_(size) {}
  void row(InputTensor tensor, int64_t token, std::span<float> to) const override {
    const bool is_large = tensor != InputTensor::k || (token >= begin_ && token < end_);
    std::fill(to.begin(), to.end(), is_large ? size_ : 0);
  }

 private:
  int64_t begin_, end_;
  float size_;
};

TEST(ScoreSize, IsThatOfTheLargestRegionWhateverItsPlace) {
  AttentionOptions o;
  o.head_dim = 16;
  AttentionWorkload problem = generated_workload(o, 100);
  problem.offsets = {0, 0, 60, 100};
  const std::vector<int64_t> lengths{0, 60, 40};
  // Queries see later keys only: two of document 1, of 60, then all of document 2.
  problem.mask =
      MaskRule(MaskTable({{}, {{3, 5, 50, 60}, {5, 60, 0, 50}}, {{0, 10, 30, 40}}}, lengths));
  EXPECT_DOUBLE_EQ(sampled_score_size(problem, KeysOfOneSize(50, 60, 3)), 36);
  EXPECT_DOUBLE_EQ(sampled_score_size(problem, KeysOfOneSize(90, 100, 3)), 36);
  EXPECT_DOUBLE_EQ(sampled_score_size(problem, KeysOfOneSize(60, 90, 3)), 1);  // nobody sees them
}

TEST(Products, BeyondFloat32AreRefused) {
  AttentionFile file;
  file.heads = file.head_dim = file.v_head_dim = 2;
  file.kv_heads = 1;
  file.scale = 0.5;
  file.offsets = {0, 1, 3};
  file.q = file.d_out = std::vector<float>(12, 1);
  file.k = file.v = std::vector<float>(6, 1);
  check_products(file, true);
  struct Case {
    std::vector<float>& values;
    float size;
    std::string problem;
  };
  for (const Case& c : std::vector<Case>{
           {file.k, 3e38F,
            "q and k of /attention have elements that make scores of up to 4.24e+38"},
           {file.v, 1e38F, "v of /attention have elements that make sums over all keys of up to"},
           {file.d_out, 3e38F, "d_out and v of /attention have elements that make gradients of s"},
           {file.q, 1e38F, "d_out, v and q of /attention have elements that make gradients of k"},
           {file.k, 1e38F,
            "d_out, v and k of /attention have elements that make gradients of q"}}) {
    const float before = std::exchange(c.values.back(), c.size);
    EXPECT_EQ(test::usage_message([&] { check_products(file, true); }).substr(0, c.problem.size()),
              c.problem);
    c.values.back() = before;
  }
  file.d_out.back() = 3e38F;
  check_products(file, false);  // the forward pass does not read it
  file.v.assign(6, 0);
  const std::string values =
      "d_out of /attention have elements that make gradients of values of up";
  EXPECT_EQ(test::usage_message([&] { check_products(file, true); }).substr(0, values.size()),
            values);
}

AttentionResult measured_row(double rate, Pass pass, int64_t tokens) {
  AttentionResult row;
  row.pass = pass;
  row.tokens = tokens;
  row.cp = 2;
  row.flops = rate * 2 * 1e9;
  row.time_ms.median = 1;
  return row;
}

TEST(AttentionResult, ExposedAndOverlap) {
  AttentionResult row = measured_row(1, Pass::forward, 8);
  row.time_ms.median = 10;
  row.exposed_ms = 2;
  row.communicate_ms = 5;
  row.exposed_noise_ms = 1;
  EXPECT_TRUE(std::isnan(row.exposed()));  // nothing is sent
  EXPECT_TRUE(std::isnan(row.overlap()));
  row.wire_bytes = 1;
  EXPECT_DOUBLE_EQ(row.exposed(), 0.2);
  EXPECT_DOUBLE_EQ(row.overlap(), 0.6);
  row.exposed_noise_ms = 5.1;  // more than all of the communication
  EXPECT_TRUE(std::isnan(row.overlap()));
  row.exposed_noise_ms = 1;
  row.exposed_ms = -1;
  EXPECT_DOUBLE_EQ(row.exposed(), -0.1);
  EXPECT_DOUBLE_EQ(row.overlap(), 1);
}

TEST(AttentionResult, ImbalanceOfKernels) {
  AttentionResult row = measured_row(1, Pass::forward, 8);
  row.ranks = {{1, 0, 0, 10, 300, 2}, {3, 0, 0, 10, 200, 4}};
  EXPECT_DOUBLE_EQ(row.kernel_imbalance(), 0.5);
}

TEST(AttentionFigures, AreTheFastestOfADirectionAndSize) {
  RunReport report;
  AttentionResult nothing = measured_row(0, Pass::forward, 0);
  add_figures(report,
              {measured_row(1, Pass::forward, 8), measured_row(5, Pass::backward, 8),
               measured_row(3, Pass::forward, 8), measured_row(2, Pass::forward, 16), nothing});
  ASSERT_EQ(report.foms.size(), 4U);
  EXPECT_DOUBLE_EQ(report.foms[0].value, 3);
  EXPECT_DOUBLE_EQ(report.foms[1].value, 5);
  EXPECT_DOUBLE_EQ(report.foms[2].value, 2);
  EXPECT_EQ(report.foms[3].metric, "average_attention_rate");
  EXPECT_DOUBLE_EQ(report.foms[3].value, 11. / 4);
}

TEST(ExplainCase, RefusesPlansThatAreTooLarge) {
  AttentionOptions o;
  o.explain = true;
  o.schedule.name = "all-to-all";
  o.cp = 1024;
  o.heads = 64;
  test::expect_usage(
      "--cp 1024: the plans of all ranks under all-to-all are too large to be explained (1024 "
      "ranks, 1048576 tokens: about 33650688 steps, messages and rectangles, at most 31457280); "
      "512 "
      "ranks work",
      [&] { explain_workload(generated_workload(o, 1 << 20), o, false); });
}

TEST(ExplainCase, RefusesDocumentsThatAreTooManyForAnyNumberOfRanks) {
  const PlannedRequest asked{find_schedule("ring"), "explained", 8, 4000};
  const auto estimate = [](int ranks) { return int64_t{1000} * ranks; };
  check_plan_size(asked, 8000, estimate);
  test::expect_usage(
      "--cp 8: the plans of all ranks under ring are too large to be explained (8 ranks, 4000 "
      "tokens: about 8000 steps, messages and rectangles, at most 2000); about 1000 tokens work",
      [&] { check_plan_size(asked, 2000, estimate); });
}

TEST(MemoryOfAPlan, IsRefusedWithWhatFits) {
  AttentionOptions o;
  o.cp = 2;
  o.check = "none";
  o.layout.name = "contiguous";
  const AttentionWorkload problem = generated_workload(o, 4096);
  // q, out, d_out, d_q: 4 · 2048 rows · 2 KiB; kv, d_kv and one more of each: 8 MiB each; stats.
  const AttentionSetup setup = setup_of(o, find_schedule("ring"), find_layout(o.layout.name), 1);
  const WorkloadLayout placed(problem, setup.layout, setup.layout_options);
  const RankPlan plan = plan_rank(
      setup.schedule, {&placed.layout, problem.heads, problem.mask, setup.schedule_options}, 0);
  const int64_t mib = 1 << 20, bytes = planned_bytes(plan, problem, setup);
  EXPECT_EQ(bytes, plan_bytes(plan) + 4 * 4 * mib + 4 * 8 * mib + 2 * 2048 * 8 * 4);
  EXPECT_GT(plan_bytes(plan), 0);
  EXPECT_LT(plan_bytes(plan), 16 << 10) << "some ten steps and arrays";
  test::expect_usage(
      "impossible configuration\n"
      "  - 4096 tokens: schedule ring: needs 50.5 MB a rank, and 25.2 MB are available; about 2048 "
      "tokens fit",
      [&] { plan_workloads({problem}, o, bytes / 2, 0); });
  plan_workloads({problem}, o, bytes, 0);
}

TEST(MemoryOfAPlan, CountsWhatAFileNeeds) {
  AttentionOptions o;
  o.cp = 4;
  o.check = "none";
  const auto bytes = [&] {
    const AttentionWorkload problem = generated_workload(o, 4096);
    const AttentionSetup setup = setup_of(o, find_schedule("ring"), find_layout("zigzag"), 0);
    return planned_bytes(PlannedAttention(problem, setup, 1).plan, problem, setup);
  };
  const int64_t kib = 1 << 10, arrays = bytes(), rows = 1024, row = 2 * kib, heads = 8;
  o.output = "out.h5";
  const int64_t statistics = 2 * 4096 * heads * 8, lse = rows * heads * 4;
  EXPECT_EQ(bytes() - arrays, statistics + 4 * rows * row + lse);
  o.replay = true;  // out, d_q, d_k and d_v of all ranks, one below the other
  EXPECT_EQ(bytes() - arrays, statistics + 8 * rows * row + lse);
}

}  // namespace GYRE_FILE
}  // namespace gyre
