// Predictions of scoring passes against closed forms: products, all-reduces, bins over replicas.

#include <gtest/gtest.h>

#include <cmath>

#include "attention/schedules/registry.hpp"
#include "errors.hpp"
#include "model/decoder_steps.hpp"
#include "predict/scoring.hpp"

namespace gyre {
namespace GYRE_FILE {

constexpr double flops_per_s = 1e9, bytes_per_s = 1e6, latency_s = 1e-3;

ModelConfig small_model() {
  ModelConfig c;
  c.vocab_size = c.vocab_padded = 64;
  c.hidden_size = 32;
  c.num_hidden_layers = 3;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 16;
  c.intermediate_size = 48;
  return c;
}

/// One rate for all products; nothing else takes time but messages.
MachineModel simple_machine() {
  MachineModel machine = flat_machine(flops_per_s, bytes_per_s, latency_s);
  LinearSurface linear;
  linear.rows = {1, 2};
  linear.flops_per_s = {flops_per_s, flops_per_s};
  machine.decoder.linears = {linear};
  return machine;
}

/// Documents of these lengths in bins of 64 slots.
ScoringPlan plan_of(const std::vector<int64_t>& lengths, GridShape grid) {
  std::vector<int64_t> offsets = {0};
  for (const int64_t length : lengths) offsets.push_back(offsets.back() + length);
  ScoringSetup setup;
  setup.grid = grid;
  setup.schedule = &find_schedule("ring");
  return plan_scoring(offsets, small_model(), setup, 64);
}

ScoringPrediction predict_scoring(const ScoringPlan& plan, const ModelConfig& config,
                                  const MachineModel& machine) {
  return ScoringPredictor(config, machine).predict(plan);
}

ScoringPrediction predict_on(const ScoringPlan& plan, const MachineModel& machine) {
  return predict_scoring(plan, small_model(), machine);
}

/// A prompt and two answers that part at their first token.
void add_answers(std::vector<int32_t>& tokens, std::vector<int64_t>& offsets, int32_t first,
                 int64_t prompt, int64_t answer) {
  for (int32_t i = 0; i < 2; ++i) {
    tokens.insert(tokens.end(), static_cast<size_t>(prompt), first);
    tokens.insert(tokens.end(), static_cast<size_t>(answer), first + 1 + i);
    offsets.push_back(std::ssize(tokens));
  }
}

// Two bins of the same boundaries, whose trees are not the same.
TEST(PredictScoring, TreesOfOneLengthAreToldApart) {
  std::vector<int32_t> tokens;
  std::vector<int64_t> offsets = {0};
  add_answers(tokens, offsets, 0, 32, 16);
  add_answers(tokens, offsets, 8, 16, 24);
  ScoringSetup setup;
  setup.grid = {1, 2, 1};
  setup.schedule = &find_schedule("ring");
  const PrefixForest forest = share_prefixes({tokens, offsets}, {8, 64});
  const ScoringPlan plan = plan_scoring(offsets, forest, small_model(), setup, 64);
  ASSERT_EQ(plan.bins.size(), 2U);
  ASSERT_EQ(plan.bins[0].cu_seqlens, plan.bins[1].cu_seqlens);
  EXPECT_EQ(plan.pairs, 528 + 2 * (136 + 16 * 32) + 136 + 2 * (300 + 24 * 16));
  EXPECT_EQ(predict_on(plan, simple_machine()).pairs, plan.pairs);
}

// Balanced layouts weigh the rows of a tree by what they see, not by where they are.
TEST(PredictScoring, BalancedLayoutsWeighTrees) {
  std::vector<int32_t> tokens;
  std::vector<int64_t> offsets = {0};
  for (int32_t i = 0; i < 16; ++i) {
    tokens.insert(tokens.end(), 16, 7);
    tokens.insert(tokens.end(), 8, 100 + i);
    offsets.push_back(std::ssize(tokens));
  }
  tokens.insert(tokens.end(), 144, 9);  // and as many tokens as the tree has
  offsets.push_back(std::ssize(tokens));
  ScoringSetup setup;
  setup.grid = {1, 4, 1};
  setup.layout = &find_layout("balanced");
  setup.layout_options.chunk = 8;
  const ScoringPlan plan =
      plan_scoring(offsets, share_prefixes({tokens, offsets}, {8, 0}), small_model(), setup, 288);
  ASSERT_EQ(plan.bins.size(), 1U);
  const BinLayout weighed = plan.layout_of(plan.bins[0]);
  BinLayout unweighed = weighed;
  LayoutOptions causal = setup.layout_options;
  causal.cp = 4;
  unweighed.layout = setup.layout->make(plan.bins[0].bounds(), causal);
  const auto most = [&](const BinLayout& layout) {
    int64_t pairs = 0;
    for (int r = 0; r < 4; ++r) {
      const AttentionProblem problem = plan.problem(layout, small_model());
      pairs = std::max(pairs, count(plan_rank(find_schedule("ring"), problem, r), Pass::forward,
                                    problem.heads, attention_types({}, 4))
                                      .pairs /
                                  problem.heads.heads);
    }
    return pairs;
  };
  EXPECT_LT(most(weighed), most(unweighed));
}

TEST(DecoderSteps, ProductsAreThoseOfAllWeights) {
  ModelConfig c = small_model();
  for (const bool gated : {false, true})
    for (const int tp : {1, 2}) {
      c.output_gate = gated;
      PassWork work;
      add_work(work, decoder_steps(c), c, tp, {}, 1, 1);
      EXPECT_EQ(tp * (work.linear_flops + work.head_flops), linear_flops_per_token(c)) << tp;
    }
}

TEST(PredictScoring, OneRankTakesItsFlops) {
  const ScoringPlan plan = plan_of({64, 40, 8}, {1, 1, 1});
  const ScoringPrediction p = predict_on(plan, simple_machine());
  const double slots = 64 + 40 + 8;
  EXPECT_NEAR(p.times.linear + p.times.head,
              linear_flops_per_token(small_model()) * slots / flops_per_s, 1e-12);
  EXPECT_NEAR(p.seconds, plan.flops(small_model()) / flops_per_s, 1e-12);
  EXPECT_EQ(p.pairs, plan.pairs);
  EXPECT_EQ(p.exposed(), 0);
  EXPECT_EQ(p.bytes_sent, 0);
}

TEST(PredictScoring, TensorParallelRanksReduceAfterEachBlock) {
  const ScoringPlan plan = plan_of({64}, {1, 1, 2});
  MachineModel machine = simple_machine();
  // One embedding, two blocks in each layer; a ring of two ranks sends half of it twice.
  const double bytes = 64 * 32 * 4, reductions = 1 + 2 * 3;
  const double gathered = 16 * 64 / bytes_per_s + latency_s;
  EXPECT_NEAR(predict_on(plan, machine).times.tp_wait,
              reductions * 2 * (latency_s + bytes / 2 / bytes_per_s) + gathered, 1e-12);
  // As measured, where it was measured of as many ranks: linear between two sizes.
  machine.decoder.all_reduces = {{2, {{bytes / 2, 3e-3}, {3 * bytes / 2, 5e-3}}}};
  EXPECT_NEAR(predict_on(plan, machine).times.tp_wait, reductions * 4e-3 + gathered, 1e-12);
  machine.decoder.all_reduces[0].ranks = 4;
  EXPECT_GT(predict_on(plan, machine).times.tp_wait, reductions * 5e-3);
}

TEST(PredictScoring, ContextParallelRanksShareSlotsAndWaitForKeys) {
  const ScoringPlan plan = plan_of({64}, {1, 2, 1});
  const ScoringPrediction p = predict_on(plan, simple_machine());
  EXPECT_NEAR(p.times.linear + p.times.head,
              linear_flops_per_token(small_model()) * 32 / flops_per_s, 1e-12);
  // A message of 32 keys and values in each layer, of which the first of two steps hides a part.
  const double message = latency_s + 32 * 2 * 32 * 4 / bytes_per_s;
  EXPECT_GT(p.times.attention_wait, 2 * message);
  EXPECT_LT(p.times.attention_wait, 3 * message);
  EXPECT_EQ(p.bytes_sent, 3 * 2 * 32 * 2 * 32 * 4);
}

TEST(PredictScoring, TheSlowestReplicaCounts) {
  const ScoringPrediction one = predict_on(plan_of({64}, {1, 1, 1}), simple_machine());
  const ScoringPrediction three = predict_on(plan_of({64, 64, 64}, {2, 1, 1}), simple_machine());
  EXPECT_NEAR(three.seconds, 2 * one.seconds, 1e-12);
  EXPECT_NEAR(three.imbalance(), 1.0 / 3, 1e-12);
}

TEST(PredictScoring, RowOperationsTakeBytes) {
  const ScoringPlan plan = plan_of({64}, {1, 1, 1});
  MachineModel machine = simple_machine();
  const double before = predict_on(plan, machine).seconds;
  machine.decoder.elementwise_bytes_per_s = 1e6;
  // Of each slot: embedding 8, first norm 8, six norms 16 bytes an element of 32; rotations of 64
  // and 32 elements, 8 bytes; activation of 48, 12 bytes.
  const double bytes = 64.0 * (32 * (8 + 8 + 6 * 16) + 3 * (96 * 8 + 48 * 12));
  EXPECT_NEAR(predict_on(plan, machine).seconds - before, bytes / 1e6, 1e-9);
  // Biases of 64 + 2 · 32 and 32 elements, norms of 64 + 32, and rotations of half as many in two
  // of three layers, each 8 bytes an element; output gates of 64 elements, 12 bytes.
  ModelConfig more = small_model();
  more.qkv_bias = more.output_bias = more.qk_norm = more.output_gate = true;
  more.rotary_dim = 8;
  more.layer_kinds = {{}, {.rotary = false}, {}};
  const double more_bytes =
      bytes + 64.0 * (8 * (3 * (128 + 32 + 96) + 2 * 48 - 3 * 96) + 12 * 3 * 64);
  const double product = 3 * 2.0 * 64 * 32 * 64 / flops_per_s;  // of the gates
  EXPECT_NEAR(predict_scoring(plan, more, machine).seconds - before - product, more_bytes / 1e6,
              1e-9);
  const double head = predict_on(plan, machine).times.head;  // the product
  machine.decoder.logprob_bytes_per_s = 1e6;
  machine.decoder.logprob_row_s = 1e-5;
  EXPECT_NEAR(predict_on(plan, machine).times.head - head, 64 * 1e-5 + 64 * 64 * 4 / 1e6, 1e-9);
}

TEST(PredictScoring, WindowsMakeFewerPairsAndFlops) {
  ModelConfig config = small_model();
  config.layer_kinds = {{}, {.window = 8}, {.window = 8}};
  const std::vector<int64_t> offsets = {0, 64, 84};
  ScoringSetup setup;
  setup.grid = {1, 2, 1};
  setup.schedule = &find_schedule("ring");
  const ScoringPlan plan = plan_scoring(offsets, config, setup, 128);
  const int64_t full = 64 * 65 / 2 + 20 * 21 / 2, seen = 36 + 56 * 8 + 36 + 12 * 8;
  EXPECT_EQ(plan.pairs_of_mask, (std::vector<int64_t>{full, seen}));
  EXPECT_EQ(plan.flops(config), 84 * linear_flops_per_token(config) +
                                    4.0 * 4 * 16 * static_cast<double>(full + 2 * seen));
  const ScoringPrediction p = predict_scoring(plan, config, simple_machine());
  EXPECT_EQ(p.pairs, full + seen);
  const ScoringPrediction causal = predict_on(plan_of({64, 20}, {1, 2, 1}), simple_machine());
  EXPECT_LT(p.times.attention, causal.times.attention);
}

TEST(PredictScoring, EqualBinsOfManyReplicasAreSimulatedOnce) {
  // 16 384 ranks; without sharing, 256 simulations of 32 ranks.
  const std::vector<int64_t> lengths(512, 64);
  const ScoringPrediction many = predict_on(plan_of(lengths, {256, 32, 2}), simple_machine());
  const ScoringPrediction two = predict_on(plan_of({64, 64}, {1, 32, 2}), simple_machine());
  EXPECT_EQ(many.seconds, two.seconds);
  EXPECT_EQ(many.bytes_sent, 256 * two.bytes_sent);
}

/// A small model with two recurrent layers around one of softmax attention, on a machine with
/// rates of f32 recurrences.
struct HybridPass {
  explicit HybridPass(GridShape grid, const char* layout = "dual-chunk-swap",
                      const char* recurrent_layout = "contiguous",
                      const std::vector<int64_t>& offsets = {0, 64}, int64_t bin = 64) {
    machine.recurrence.rates = {{"gdn", Pass::forward, DType::f32, 0, 0, flops_per_s}};
    config.layer_kinds = {{.recurrent = true}, {}, {.recurrent = true}};
    config.recurrent = {
        .key_heads = 2, .value_heads = 4, .key_dim = 8, .value_dim = 12, .conv_width = 4};
    setup.grid = grid;
    setup.layout = &find_layout(layout);
    setup.schedule = &find_schedule("ring");
    setup.recurrent_layout = &find_layout(recurrent_layout);
    plan = plan_scoring(offsets, config, setup, bin);
  }
  ScoringPrediction predicted() const { return predict_scoring(plan, config, machine); }

  MachineModel machine = simple_machine();
  ModelConfig config = small_model();
  ScoringSetup setup;
  ScoringPlan plan;
};

TEST(PredictScoring, RecurrentLayersTakeTheirProductsAndChunks) {
  const HybridPass pass({1, 1, 1});
  const ScoringPrediction p = pass.predicted();
  EXPECT_NEAR(p.times.linear + p.times.head, linear_flops_per_token(pass.config) * 64 / flops_per_s,
              1e-12);
  // The chunk's products: 6 K V + 2 C (3 K + 2 V) for a token and head.
  const double chunks = 64.0 * 4 * (6 * 8 * 12 + 2 * 64 * (3 * 8 + 2 * 12));
  EXPECT_NEAR(p.times.recurrence, 2 * chunks / flops_per_s, 1e-12);
  EXPECT_EQ(p.times.recurrence_wait, 0);
  EXPECT_EQ(p.recurrent_bytes, 0);
  EXPECT_NEAR(p.seconds, p.times.total(), 1e-15);
}

// One document of 64 tokens on two ranks: each sends a quarter of its rows there and back, and rank
// 0 sends rank 1 the three rows that its convolution reads, of which rank 0 owns none.
TEST(PredictScoring, ChangesOfLayoutTakeTheirMessages) {
  const HybridPass pass({1, 2, 1});
  const ScoringPrediction p = pass.predicted();
  EXPECT_EQ(p.recurrent.relayouts, 4);
  const auto seconds = [](int64_t rows, int64_t columns) {
    return latency_s + static_cast<double>(4 * rows * columns) / bytes_per_s;
  };
  EXPECT_NEAR(p.recurrent.relayout_seconds, 2 * 2 * seconds(16, 32), 1e-12);
  const int64_t there = 2 * 16 + 2 * 48 + 2 * 4, back = 48;
  EXPECT_NEAR(p.recurrent.projected_seconds, 2 * (seconds(16, there) + seconds(16, back)), 1e-12);
  EXPECT_EQ(p.recurrent.relayout.most(), (RecurrentTraffic{4, 4 * 16 * 32 * 4}));
  EXPECT_EQ(p.recurrent.projected.most(), (RecurrentTraffic{4, 2 * 16 * (there + back) * 4}));
  EXPECT_GT(p.times.recurrence_wait, p.recurrent.relayout_seconds);
}

// By the owners of rows and the closed forms of schedules, without plans.
TEST(PredictScoring, MessagesOfRecurrentLayersAreThoseOfTheirClosedForms) {
  int compared = 0;
  for (const char* layout : {"contiguous", "dual-chunk-swap", "striped"})
    for (const StateSchedule& states : state_schedules())
      for (const GridShape grid : {GridShape{1, 2, 1}, {1, 4, 2}, {2, 2, 1}}) {
        HybridPass pass(grid, layout, "contiguous", {0, 30, 64, 77, 133}, 80);
        pass.plan.setup.state_schedule = &states;
        if (grid.cp * grid.tp > 4 && states.name == "head-exchange") continue;  // too few heads
        const ScoringPrediction p = pass.predicted();
        int64_t bytes = 0;
        for (const PackedBatch& bin : pass.plan.bins) {
          const BinLayout of_bin = pass.plan.layout_of(bin);
          for (int rank = 0; rank < grid.cp; ++rank)
            bytes += grid.tp * 2 *
                     expected_traffic(pass.plan.recurrent_problem(of_bin, pass.config), rank).bytes;
        }
        EXPECT_EQ(p.recurrent_bytes, bytes) << layout << ", " << states.name;
        ++compared;
      }
  EXPECT_GE(compared, 30);
}

TEST(PredictScoring, PartsThatPlansShareAreThoseOfEach) {
  const HybridPass first({1, 2, 1}), second({1, 2, 1}, "striped");
  HybridPass third({1, 4, 1}, "contiguous");
  third.plan.setup.state_schedule = &state_schedules().at(1);
  ScoringPredictor predictor(first.config, first.machine);
  for (const HybridPass* pass :
       std::initializer_list<const HybridPass*>{&first, &second, &third, &second, &first}) {
    const ScoringPrediction shared = predictor.predict(pass->plan), alone = pass->predicted();
    EXPECT_EQ(shared.seconds, alone.seconds);
    EXPECT_EQ(shared.recurrent_bytes, alone.recurrent_bytes);
    EXPECT_EQ(shared.recurrent.relayout_seconds, alone.recurrent.relayout_seconds);
  }
}

TEST(PredictScoring, RecurrencesNeedRates) {
  HybridPass pass({1, 2, 1});
  pass.machine.recurrence.rates[0].type = DType::bf16;
  test::expect_usage("no recurrence gdn fwd of f32; the machine has gdn fwd of bf16",
                     [&] { pass.predicted(); });
  pass.plan.setup.types.activations = DType::bf16;  // whose rates count where there are none of f32
  pass.machine.decoder.linears[0].type = DType::bf16;
  EXPECT_GT(pass.predicted().times.recurrence, 0);
  const HybridPass striped({1, 2, 1}, "contiguous", "striped");
  test::expect_usage(
      "recurrent layout striped, states state-gather: under striped rank 0 has one in 2 tokens of "
      "a "
      "document; a convolution is of consecutive tokens",
      [&] { striped.predicted(); });
}

TEST(PredictScoring, WithoutLinearsIsRefused) {
  test::expect_usage("the machine has no 'linears', which a model's layers need", [&] {
    predict_on(plan_of({64}, {1, 1, 1}), flat_machine(1e9));
  });
}

}  // namespace GYRE_FILE
}  // namespace gyre
