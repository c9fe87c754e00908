// What gyre-logprobs makes of its options and of its measurements.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "apps/logprobs/options.hpp"
#include "apps/logprobs/registry.hpp"
#include "apps/logprobs/report.hpp"
#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

std::pair<int, int> grid_of(int tp, int cp, int ranks) {
  LogprobsOptions o;
  o.tp = tp;
  o.cp = cp;
  check_options(o, ranks);
  return {o.tp, o.cp};
}

TEST(LogprobsOptions, GridTakesWhatIsLeft) {
  EXPECT_EQ(grid_of(0, 0, 6), (std::pair{6, 1}));
  EXPECT_EQ(grid_of(2, 0, 6), (std::pair{2, 3}));
  EXPECT_EQ(grid_of(0, 2, 6), (std::pair{3, 2}));
  EXPECT_EQ(grid_of(3, 2, 6), (std::pair{3, 2}));
  LogprobsOptions shards;
  shards.shards = "30K,2K,768";
  check_options(shards, 6);
  EXPECT_EQ(shards.tp, 3);
  EXPECT_EQ(shards.cp, 2);
}

TEST(LogprobsOptions, ColumnsAreDealt) {
  LogprobsOptions o;
  o.vocab = 259;
  o.tp = 4;
  check_options(o, 4);
  EXPECT_EQ(o.partition().offsets, (std::vector<int64_t>{0, 65, 130, 195, 260}));
  EXPECT_EQ(o.partition().vocab_size, 259);
  o.padded = 264;
  EXPECT_EQ(o.partition().offsets, (std::vector<int64_t>{0, 66, 132, 198, 264}));
  o.padded = 0;
  o.shards = "100,0,60,100";
  EXPECT_EQ(o.partition().offsets, (std::vector<int64_t>{0, 100, 100, 160, 260}));
}

TEST(LogprobsOptions, WhatIsImpossibleIsListedWithTheNearest) {
  using O = LogprobsOptions;
  for (const auto& [problems, change] :
       std::vector<std::pair<std::string, std::function<void(O&)>>>{
           {"  - --tp 3 --cp 1 in a run of 4 ranks; the nearest grids: --tp 4 --cp 1 | --tp 2 --cp "
            "2 | --tp 1 --cp 4",
            [](O& o) { o.tp = 3; }},
           {"  - --tp 3 --cp 8 in a run of 4 ranks; the nearest grids: --tp 1 --cp 4 | --tp 2 --cp "
            "2 | --tp 4 --cp 1",
            [](O& o) { o.tp = 3, o.cp = 8; }},
           {"  - --vocab, --padded: 262 columns cannot be dealt evenly to 4 ranks; 264 can",
            [](O& o) { o.vocab = 259, o.padded = 262; }},
           {"  - --padded 256 is less than --vocab 259; the nearest is 260",
            [](O& o) { o.vocab = 259, o.padded = 256; }},
           {"  - --shards 100,100 is 2 shards, but --tp is 4; give 4\n"
            "  - --shards 100,100 are 200 columns for --vocab 259; at least 259",
            [](O& o) { o.vocab = 259, o.tp = 4, o.shards = "100,100"; }},
           {"  - --shards 2G,0,8000000000G,1: at most 2147483647 columns in all",
            [](O& o) { o.vocab = 259, o.tp = 4, o.shards = "2G,0,8000000000G,1"; }},
           {"  - --shards: 'x' is not a size (digits, then K, M or G for 2^10, 2^20, 2^30)",
            [](O& o) { o.vocab = 259, o.tp = 4, o.shards = "100,x,1,1"; }},
           {"  - --max 10 needs --min\n"
            "  - --sequences 5000 of 512 tokens; at most 512\n"
            "  - --top-k 40000 of --vocab 32768; the nearest is 32768\n"
            "  - --chunk 16 goes with --method upstream or all\n"
            "  - --stripe 2: layout dual-chunk-swap does not read it; striped does",
            [](O& o) {
              o.sweep.max = 10, o.sequences = 5000, o.top_k = 40000;
              o.chunk = 16, o.layout.options.stripe = 2;
            }},
           // Logits stay far from the limits of their type.
           {"  - --logit-scale 1 and --peak-height -2e+20 over --temperature 1e-10 make logits of "
            "2e+30; at most 1e+30",
            [](O& o) { o.logit_scale = 1, o.peak_height = -2e20, o.temperature = 1e-10; }},
           // Nothing that is given is ignored.
           {"  - --tokens, --min and --sequences do not go with --input or --gen",
            [](O& o) { o.generate = "dist=fixed", o.sequences = 5; }},
           {"  - --op raw-gather has no --method upstream, which logprob, entropy, gather, "
            "soft-ce, top-k and filtered have; the nearest is --method gyre",
            [](O& o) { o.op = "raw-gather", o.method = "upstream"; }},
           {"  - --op top-k has no backward pass; the nearest is --pass fwd",
            [](O& o) { o.op = "top-k", o.method = "gyre", o.pass = "bwd"; }},
           {"  - --output writes results of our operations, forward too: not with --pass bwd "
            "--method gyre",
            [](O& o) { o.op = "logprob", o.method = "gyre", o.pass = "bwd", o.output = "x.h5"; }},
           // Refused though it is what packed sequences do anyway.
           {"  - --gather-gradient split goes with --op packed, packed-prerolled, packed-filtered "
            "or all, not with logprob",
            [](O& o) { o.gather_gradient = "split", o.op = "logprob"; }},
           {"  - --gather-gradient sum is of backward passes: not with --pass fwd",
            [](O& o) { o.gather_gradient = "sum", o.pass = "fwd", o.op = "packed"; }},
           {"  - --f32-output goes with --op log-softmax, softmax or all, not with entropy",
            [](O& o) { o.dtype = "bf16", o.f32_output = true, o.op = "entropy"; }}}) {
    O o;
    change(o);
    test::expect_usage("impossible configuration\n" + problems, [&] { check_options(o, 4); });
  }
}

TEST(LogprobsOptions, SomeOperationsHaveOptionsOfTheirOwn) {
  for (const char* op : {"all", "packed", "packed-prerolled"}) {
    LogprobsOptions o;
    o.op = op;
    o.gather_gradient = "sum";
    EXPECT_NO_THROW(check_options(o, 4)) << op;
    EXPECT_EQ(o.gather_convention(), GatherGradient::sum);
  }
  LogprobsOptions o;
  EXPECT_EQ(o.gather_convention(), GatherGradient::split);
  o.gather_gradient = "none";
  EXPECT_EQ(o.gather_convention(), GatherGradient::none);
  o.dtype = "bf16";
  EXPECT_EQ(o.output_type(), DType::bf16);
  for (const char* op : {"all", "log-softmax", "softmax"}) {
    LogprobsOptions wide;
    wide.dtype = "bf16", wide.op = op, wide.f32_output = true;
    EXPECT_EQ(wide.output_type(), DType::f32);
    EXPECT_NO_THROW(check_options(wide, 4)) << op;
  }
}

TEST(Operations, AreFoundByName) {
  EXPECT_EQ(find_operation("soft-ce").name, "soft-ce");
  std::vector<std::string> names;
  for (const LogprobsOperation& operation : logprobs_operations()) names.push_back(operation.name);
  test::expect_usage(fmt::format("operation 'softce' is none of {}", fmt::join(names, ", ")),
                     [] { find_operation("softce"); });
  EXPECT_NE(operation_help().find("distill-renormalised"), std::string::npos);
}

LogprobsWorkload small_case(LogprobsOptions& o) {
  check_options(o, 4);
  return generated_workload(o, o.sweep.tokens);
}

TEST(Memory, IsRefusedWithWhatFits) {
  LogprobsOptions o;
  o.sweep.tokens = 4096;
  o.tp = 4;
  o.picks = 1;
  const LogprobsWorkload problem = small_case(o);
  const LogprobsOperation op = find_operation("logprob");
  const LogprobsRun ours{op, op.methods[0]}, theirs{op, op.methods[1]};
  // Logits and gradient, f32; 40 + 24 + 12 · 4 · 3 bytes a token beside them.
  const int64_t matrix = 4096 * 8192 * 4, small = 4096 * 208;
  EXPECT_EQ(ours.planned_bytes(problem, o, 0), 2 * matrix + small);
  EXPECT_EQ(theirs.planned_bytes(problem, o, 0), 7 * matrix + small);
  EXPECT_EQ(ours.why_not(problem, o, 0, 0), "");
  EXPECT_EQ(ours.why_not(problem, o, 2 * matrix + small, 0), "");
  EXPECT_EQ(ours.why_not(problem, o, matrix + small / 2, 0),
            "needs 269 MB a rank, and 135 MB are available; about 2048 tokens fit");
  EXPECT_EQ(
      ours.why_not(problem, o, 1000, 0),
      "needs 269 MB a rank, and 1 kB are available; not even one token fits: take more ranks");
  o.pass = "fwd";
  EXPECT_EQ(ours.planned_bytes(problem, o, 0), matrix + small);
  o.dtype = "bf16";
  EXPECT_EQ(ours.planned_bytes(generated_workload(o, 4096), o, 0), matrix / 2 + small);
}

TEST(Memory, OfMoreBytesThanIntegersCountIsRefused) {
  LogprobsOptions o;
  o.vocab = o.sweep.tokens = int64_t{1} << 30;
  check_options(o, 1);
  const LogprobsWorkload problem = generated_workload(o, o.sweep.tokens);
  const LogprobsOperation op = find_operation("logprob");
  EXPECT_EQ((LogprobsRun{op, op.methods[0]}.why_not(problem, o, 1 << 30, 0)),
            "needs 9.22 EB a rank, and 1.07 GB are available; not even one token fits: take more "
            "ranks");
}

TEST(Operations, SayWhatTheyCannotDo) {
  LogprobsOptions o;
  o.vocab = 8;
  o.temperature = 2;
  const LogprobsWorkload problem = small_case(o);
  const auto refusal = [&](const char* name, size_t method) {
    const LogprobsOperation op = find_operation(name);
    return LogprobsRun{op, op.methods.at(method)}.why_not(problem, o, 0, 0);
  };
  EXPECT_EQ(refusal("distill", 0), "a teacher has no 64 largest of 8 logits; the most are 8");
  EXPECT_EQ(refusal("topk-kl", 0), "");  // all 8 are the largest
  EXPECT_EQ(refusal("entropy", 1), "upstream has no temperature but 1, not 2");
  EXPECT_EQ(refusal("entropy", 0), "");
}

LogprobsResult measured_row(const std::string& op, const std::string& method, double ms) {
  LogprobsResult row;
  row.op = op;
  row.method = method;
  row.tokens = 8;
  row.time_ms.median = ms;
  row.ideal_bytes = 6e6;
  row.flops = std::nan("");
  return row;
}

TEST(LogprobsResult, Rates) {
  LogprobsResult row = measured_row("logprob", "gyre", 2);
  EXPECT_DOUBLE_EQ(row.gbytes_per_s(), 3);
  EXPECT_TRUE(std::isnan(row.share_of_limit()));  // unknown
  row.limit = 6e9;
  EXPECT_DOUBLE_EQ(row.share_of_limit(), 0.5);
  row.flops = 4e9;
  row.limit = 8e12;
  EXPECT_DOUBLE_EQ(row.tflops_per_rank(), 2);
  EXPECT_DOUBLE_EQ(row.share_of_limit(), 0.25);
}

TEST(LogprobsFigures, AreOfTheUsualOperationAndOfBothMethods) {
  LogprobsResult nothing = measured_row("logprob-entropy", "gyre", 1);
  nothing.tokens = 0;
  const std::vector<Fom> figures =
      figures_of({measured_row("logprob", "gyre", 2), measured_row("logprob", "upstream", 12),
                  measured_row("logprob-entropy", "gyre", 3), nothing});
  ASSERT_EQ(figures.size(), 2U);
  EXPECT_EQ(figures[0].metric, "speedup_over_upstream");
  EXPECT_DOUBLE_EQ(figures[0].value, 6);
  EXPECT_EQ(figures[1].metric, "logits_rate");
  EXPECT_DOUBLE_EQ(figures[1].value, 2);
}

TEST(LogprobsFigures, DoNotCompareTimingsThatBreakARunRule) {
  for (const bool ours : {true, false}) {
    std::vector<LogprobsResult> rows{measured_row("logprob", "gyre", 2),
                                     measured_row("logprob", "upstream", 12)};
    rows[ours ? 0 : 1].timing.samples_ms = {{2.0}};  // one repetition
    const std::vector<Fom> figures = figures_of(rows);
    ASSERT_EQ(figures.size(), 1U);
    EXPECT_EQ(figures[0].metric, "logits_rate");
  }
}

TEST(LogprobsFigures, AreKnownFromTheOptions) {
  using Names = std::vector<std::string>;
  LogprobsOptions o;
  o.op = "logprob", o.method = "gyre";
  const Names rates = {"logits_rate", "share_of_bandwidth", "average_logits_rate",
                       "average_share_of_bandwidth"};
  EXPECT_EQ(metrics_of(o), rates);
  o.op = "raw-gather", o.pass = "fwd";
  EXPECT_EQ(metrics_of(o), Names{});
  o.op = "fused-linear";
  EXPECT_EQ(metrics_of(o), (Names{"fused_linear_rate", "average_fused_linear_rate"}));
  o.op = "logprob", o.method = "upstream";
  EXPECT_EQ(metrics_of(o), Names{});
  o.method = "all";
  EXPECT_EQ(metrics_of(o).at(2), "speedup_over_upstream");
}

TEST(LogprobsFigures, OfManyRowsHaveAnAverage) {
  LogprobsResult longer = measured_row("logprob", "gyre", 4);
  longer.tokens *= 2;
  const std::vector<Fom> figures = figures_of({measured_row("logprob", "gyre", 2), longer});
  ASSERT_EQ(figures.size(), 3U);
  EXPECT_EQ(figures[2].metric, "average_logits_rate");
  EXPECT_DOUBLE_EQ(figures[2].value, (figures[0].value + figures[1].value) / 2);
  EXPECT_EQ(to_text(figures[2].tags), "rows=2");
}

// Without the usual operation the first one stands in for it; products have a rate of their own.
TEST(LogprobsFigures, AreOfTheFirstOperationWithoutTheUsualOne) {
  LogprobsResult product = measured_row("fused-linear", "gyre", 2);
  product.ideal_bytes = std::nan("");
  product.flops = 4e9;
  LogprobsResult hardly = measured_row("raw-gather", "gyre", 2);
  hardly.ideal_bytes = std::nan("");
  const std::vector<Fom> figures = figures_of(
      {hardly, measured_row("raw-gather", "gyre", 3), measured_row("argmax", "gyre", 3), product});
  ASSERT_EQ(figures.size(), 2U);
  EXPECT_EQ(figures[0].metric, "logits_rate");
  EXPECT_EQ(figures[0].unit, "GB/s/rank");
  EXPECT_DOUBLE_EQ(figures[0].value, 2);
  EXPECT_EQ(figures[1].metric, "fused_linear_rate");
  EXPECT_EQ(figures[1].unit, "TFLOP/s/rank");
  EXPECT_DOUBLE_EQ(figures[1].value, 2);
}

}  // namespace GYRE_FILE
}  // namespace gyre
