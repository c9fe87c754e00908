// The whole scoring path on every grid of the world's size, under every layout and schedule,
// against the decoder's serial twin.

#include "model/scoring.hpp"

#include <cstring>
#include <iostream>

#include "errors.hpp"
#include "model/decoder_reference.hpp"
#include "random_model.hpp"
#include "scoring_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::all_grids;
using test::Documents;
using test::name_of;
using test::plan_of;
using test::ragged_documents;
using test::rollouts;
using test::setup_of;
using test::world;

/// What the serial twin says of all predictions, in document order.
struct TwinScores {
  std::vector<double> logprob, entropy;
};

TwinScores twin_scores(const Documents& documents, const ModelConfig& config,
                       DType type = DType::f32) {
  const DecoderWeights whole =
      load_weights(config, 1, 0, test::random_weights(config), type).widened();
  TwinScores all;
  for (int64_t d = 0; d < documents.view().size(); ++d) {
    const ReferenceScores scores =
        score_document_reference(config, whole, documents.view().document(d));
    all.logprob.insert(all.logprob.end(), scores.logprob.begin(), scores.logprob.end());
    all.entropy.insert(all.entropy.end(), scores.entropy.begin(), scores.entropy.end());
  }
  return all;
}

/// The largest difference; infinite where there is a NaN.
double worst_error(const ScoreRange& mine, const TwinScores& twin) {
  double worst = 0;
  for (int64_t i = mine.begin; i < mine.end(); ++i) {
    const int64_t at = i - mine.begin, all = i;
    const double error =
        std::max(std::abs(static_cast<double>(mine.logprob[at]) - twin.logprob[all]),
                 std::abs(static_cast<double>(mine.entropy[at]) - twin.entropy[all]));
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  return worst;
}
constexpr double tolerance = 2e-5;
/// Of bf16 passes, whose largest errors are 0.02 to 0.04 here.
constexpr double narrow_tolerance = 0.1;

struct ScoringRun {
  ScoreRange range;
  PlanCount count;   ///< of softmax layers, from the plans
  Traffic measured;  ///< of all layers, from the communicator
  RecurrentTraffic recurrent, recurrent_form, recurrent_measured;
};

ScoringRun score(const Documents& documents, const ModelConfig& config, const ScoringSetup& setup,
                 int64_t min_prefix = 0) {
  ProcessGrid grid(world(), setup.grid);
  HostStream stream;
  const auto kernel = make_cpu_kernel();
  Decoder decoder(config, setup.types,
                  load_weights(config, setup.grid.tp, grid.tp_rank(), test::random_weights(config),
                               setup.types.activations),
                  grid, *kernel, stream);
  const ScoringPlan plan = plan_of(documents, config, setup, min_prefix);
  Scorer scorer(documents.view(), config, plan, grid);
  const Traffic before = grid.cp().traffic();
  scorer.run(decoder);
  const Traffic after = grid.cp().traffic();
  return {scorer.in_document_order(world()),
          scorer.count(),
          {after.bytes_sent - before.bytes_sent, after.messages - before.messages},
          scorer.recurrent_sent(),
          scorer.recurrent_expected(),
          decoder.recurrent_traffic()};
}

/// Why the schedule refuses a bin in layers of any mask, or "".
std::string refusal_of(const Documents& documents, const ModelConfig& config,
                       const ScoringSetup& setup, int64_t min_prefix = 0) {
  const ScoringPlan plan = plan_of(documents, config, setup, min_prefix);
  for (const PackedBatch& bin : plan.bins) {
    const BinLayout layout = plan.layout_of(bin);
    for (size_t mask = 0; mask < plan.masks.size(); ++mask)
      if (std::string reason = setup.schedule->why_not(plan.problem(layout, config, mask));
          !reason.empty())
        return reason;
  }
  return "";
}

/// Scores, and compares scores with the twin's and traffic with the plan's.
void expect_right(const Documents& documents, const ModelConfig& config, const TwinScores& twin,
                  const ScoringSetup& setup, int64_t min_prefix = 0) {
  const ScoringRun run = score(documents, config, setup, min_prefix);
  const bool narrow = setup.types.activations == DType::bf16;
  EXPECT_LE(worst_error(run.range, twin), narrow ? narrow_tolerance : tolerance) << name_of(setup);
  EXPECT_EQ(run.measured.bytes_sent, run.count.bytes_sent + run.recurrent.bytes) << name_of(setup);
  EXPECT_EQ(run.measured.messages, run.count.messages + run.recurrent.messages) << name_of(setup);
  EXPECT_EQ(run.recurrent, run.recurrent_measured) << name_of(setup);
  EXPECT_EQ(run.recurrent, run.recurrent_form) << name_of(setup);
}

TEST(Scoring, EveryGridEqualsTheSerialTwin) {
  const bool poisoned = poison_new_buffers(true);
  const ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  const TwinScores twin = twin_scores(documents, config);
  ASSERT_EQ(prediction_offsets(documents.offsets).back(), std::ssize(twin.logprob));
  const std::vector<GridShape> grids = all_grids(config);
  for (const GridShape& grid : grids) expect_right(documents, config, twin, setup_of(grid));
  EXPECT_GE(grids.size(), 1u);
  poison_new_buffers(poisoned);
}

// Weights, activations and messages are bf16; every feature of layers is on.
TEST(Scoring, Bf16PassesAreNearTheTwinOfTheRoundedWeights) {
  const bool poisoned = poison_new_buffers(true);
  ModelConfig config = test::small_config();
  config.qkv_bias = config.output_bias = config.qk_norm = config.attention_sinks = true;
  const Documents documents = ragged_documents(config);
  const TwinScores twin = twin_scores(documents, config, DType::bf16);
  for (const GridShape& grid : all_grids(config))
    for (const DType residual : {DType::f32, DType::bf16}) {
      ScoringSetup setup = setup_of(grid);
      setup.types = {DType::bf16, residual};
      expect_right(documents, config, twin, setup);
      EXPECT_GT(worst_error(score(documents, config, setup).range, twin), 100 * tolerance);
    }
  poison_new_buffers(poisoned);
}

// Frequencies that differ from theta^(-2i/D), a factor of cos and sin, and elements that do not
// turn.
TEST(Scoring, ScaledAndPartialRotationsOnEveryGrid) {
  ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  const TwinScores plain = twin_scores(documents, config);
  config.rotary_dim = 6;
  config.rope_scaling = {.type = RopeType::yarn,
                         .factor = 4,
                         .original_max_position_embeddings = 16,
                         .attention_factor = 1.25};
  const TwinScores twin = twin_scores(documents, config);
  EXPECT_NE(twin.logprob, plain.logprob);
  for (const GridShape& grid : all_grids(config))
    expect_right(documents, config, twin, setup_of(grid));
}

// Biases of all projections of attention, norms of queries and keys, and a layer that does not
// turn.
TEST(Scoring, BiasesAndNormsOfHeadsOnEveryGrid) {
  ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  const TwinScores plain = twin_scores(documents, config);
  config.qkv_bias = config.output_bias = config.qk_norm = true;
  config.layer_kinds = {{.rotary = false}, {}};
  const TwinScores twin = twin_scores(documents, config);
  EXPECT_NE(twin.logprob, plain.logprob);
  for (const GridShape& grid : all_grids(config))
    expect_right(documents, config, twin, setup_of(grid));
}

TEST(Scoring, ActivationsOfTheGateOnEveryGrid) {
  ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  TwinScores other = twin_scores(documents, config);
  for (const GateActivation activation : {GateActivation::gelu, GateActivation::gelu_tanh}) {
    config.hidden_act = activation;
    const TwinScores twin = twin_scores(documents, config);
    double difference = 0;
    for (size_t i = 0; i < twin.logprob.size(); ++i)
      difference = std::max(difference, std::abs(twin.logprob[i] - other.logprob[i]));
    EXPECT_GT(difference, 10 * tolerance);
    for (const GridShape& grid : all_grids(config))
      expect_right(documents, config, twin, setup_of(grid));
    other = twin;
  }
}

TEST(Scoring, SoftCapOfLogitsOnEveryGrid) {
  ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  const TwinScores plain = twin_scores(documents, config);
  config.final_soft_cap = 2;
  const TwinScores twin = twin_scores(documents, config);
  EXPECT_NE(twin.logprob, plain.logprob);
  EXPECT_GT(*std::ranges::min_element(twin.logprob), -4 - std::log(config.vocab_size));
  for (const GridShape& grid : all_grids(config))
    expect_right(documents, config, twin, setup_of(grid));
}

// All pairs where every rank is a context-parallel one, and with two tensor-parallel ranks.
TEST(Scoring, EveryScheduleUnderEveryLayoutEqualsTheSerialTwin) {
  const bool poisoned = poison_new_buffers(true);
  const ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  const TwinScores twin = twin_scores(documents, config);
  std::vector<GridShape> grids = {{1, world().size(), 1}};
  if (world().size() % 2 == 0) grids.push_back({1, world().size() / 2, 2});
  size_t number = 0;
  for (const GridShape& grid : grids)
    for (const Schedule& schedule : schedules()) {
      size_t refused = 0, tried = 0, i = number++;
      for (const LayoutKind& layout : layout_kinds()) {
        if (!test::runs_combination(i++)) continue;
        ++tried;
        const ScoringSetup setup = setup_of(grid, layout.name, schedule.name);
        if (const std::string reason = refusal_of(documents, config, setup); !reason.empty()) {
          ++refused;
          if (world().rank() == 0) std::cout << name_of(setup) << " refused: " << reason << '\n';
          continue;
        }
        expect_right(documents, config, twin, setup);
      }
      // Of all schedules only this one needs something that scoring never gives: a window.
      EXPECT_EQ(refused, schedule.name == "halo" ? tried : 0) << schedule.name;
    }
  poison_new_buffers(poisoned);
}

// Tensor-parallel ranks beyond the KV heads share them: one and two KV heads for up to eight ranks.
TEST(Scoring, RanksShareKvHeads) {
  ModelConfig config = test::small_config();
  config.qkv_bias = true;
  for (const int64_t kv_heads : {1, 2}) {
    config.num_key_value_heads = kv_heads;
    const std::vector<int> allowed = allowed_tensor_parallel(config, 8);
    EXPECT_EQ(allowed, (std::vector<int>{1, 2, 4, 8}));
    const Documents documents = ragged_documents(config);
    const TwinScores twin = twin_scores(documents, config);
    for (const GridShape& grid : nearest_grids({1, 1, 8}, world().size(), allowed))
      if (grid.tp > kv_heads) expect_right(documents, config, twin, setup_of(grid));
  }
}

TEST(Scoring, KvHeadsThatRanksCannotShare) {
  ModelConfig config = test::small_config();
  config.num_attention_heads = 12;
  config.num_key_value_heads = 6;
  config.intermediate_size = 48;
  EXPECT_EQ(allowed_tensor_parallel(config, 12), (std::vector<int>{1, 2, 3, 6, 12}));
  ConfigErrors errors;
  check_tensor_parallel(config, 4, errors);
  EXPECT_FALSE(errors.empty());
  EXPECT_GT(weight_bytes(config, 12), weight_bytes(config, 1) / 12);
}

// Windows in some layers and in all, longer than a rank's part of a document and shorter, on every
// grid; and under every layout and schedule.
TEST(Scoring, WindowsOfLayersEqualTheSerialTwin) {
  const bool poisoned = poison_new_buffers(true);
  ModelConfig config = test::small_config();
  config.num_hidden_layers = 3;
  const Documents documents = ragged_documents(config);
  const TwinScores plain = twin_scores(documents, config);
  const std::vector<std::vector<LayerKind>> patterns = {
      {{.window = 5}, {}, {.window = 5}}, {{}, {.window = 40}, {}}, {{}, {.window = 1}, {}}};
  for (const std::vector<LayerKind>& kinds : patterns) {
    config.layer_kinds = kinds;
    const TwinScores twin = twin_scores(documents, config);
    EXPECT_NE(twin.logprob, plain.logprob);
    for (const GridShape& grid : all_grids(config))
      expect_right(documents, config, twin, setup_of(grid));
  }
  config.num_hidden_layers = 1;
  config.layer_kinds = {{.window = 2}};
  const TwinScores twin = twin_scores(documents, config);
  size_t number = 0;
  bool halo_ran = false;
  for (const Schedule& schedule : schedules()) {
    size_t i = number++;
    for (const LayoutKind& layout : layout_kinds()) {
      if (!test::runs_combination(i++)) continue;
      const ScoringSetup setup = setup_of({1, world().size(), 1}, layout.name, schedule.name);
      const std::string refusal = refusal_of(documents, config, setup);
      EXPECT_TRUE(refusal.empty() || schedule.name == "halo") << refusal;
      if (!refusal.empty()) continue;
      expect_right(documents, config, twin, setup);
      halo_ran |= schedule.name == "halo";
    }
  }
  EXPECT_TRUE(halo_ran);
  poison_new_buffers(poisoned);
}

// Layers with and without a window have plans of their own.
TEST(Scoring, SinksOnEveryGridAndUnderEverySchedule) {
  const bool poisoned = poison_new_buffers(true);
  ModelConfig config = test::small_config();
  config.layer_kinds = {{}, {.window = 5}};
  const Documents documents = ragged_documents(config);
  const TwinScores plain = twin_scores(documents, config);
  config.attention_sinks = true;
  const TwinScores twin = twin_scores(documents, config);
  EXPECT_NE(twin.logprob, plain.logprob);
  for (const GridShape& grid : all_grids(config))
    expect_right(documents, config, twin, setup_of(grid));
  for (const Schedule& schedule : schedules()) {
    const ScoringSetup setup = setup_of({1, world().size(), 1}, "dual-chunk-swap", schedule.name);
    if (refusal_of(documents, config, setup).empty()) expect_right(documents, config, twin, setup);
  }
  poison_new_buffers(poisoned);
}

/// The layouts of recurrent layers that a bin of these documents admits.
std::vector<const LayoutKind*> recurrent_layouts(const Documents& documents,
                                                 const ModelConfig& config, ScoringSetup setup) {
  std::vector<const LayoutKind*> admitted;
  for (const LayoutKind& kind : layout_kinds()) {
    setup.recurrent_layout = &kind;
    const ScoringPlan plan = plan_of(documents, config, setup, 0);
    if (std::ranges::all_of(plan.bins, [&](const PackedBatch& bin) {
          const BinLayout of_bin = plan.layout_of(bin);
          return recurrent_refusal(plan.recurrent_problem(of_bin, config)).empty();
        }))
      admitted.push_back(&kind);
  }
  return admitted;
}

// Recurrent layers under a layout of their own: documents that cross ranks, parts that are shorter
// than the convolution, ranks without a token; every softmax layout, and every schedule of states.
TEST(Scoring, RecurrentLayersEqualTheSerialTwin) {
  const bool poisoned = poison_new_buffers(true);
  const ModelConfig config = test::hybrid_config();
  const Documents documents = ragged_documents(config);
  const TwinScores twin = twin_scores(documents, config);
  for (const GridShape& grid : all_grids(config))
    expect_right(documents, config, twin, setup_of(grid));
  const GridShape cp{1, world().size(), 1};
  for (const LayoutKind& layout : layout_kinds())
    for (const StateSchedule& schedule : state_schedules()) {
      ScoringSetup setup = setup_of(cp, layout.name);
      setup.state_schedule = &schedule;
      if (!recurrent_layouts(documents, config, setup).empty())
        expect_right(documents, config, twin, setup);
    }
  const auto admitted = recurrent_layouts(documents, config, setup_of(cp));
  EXPECT_GE(admitted.size(), 1U);
  for (const LayoutKind* layout : admitted) {
    ScoringSetup setup = setup_of(cp);
    setup.recurrent_layout = layout;
    expect_right(documents, config, twin, setup);
  }
  poison_new_buffers(poisoned);
}

TEST(Scoring, StatesOfTreesAreRefused) {
  const ModelConfig config = test::hybrid_config();
  test::expect_usage(
      "documents that share a prefix, and a model with 2 recurrent layers: states of trees are not "
      "supported",
      [&] {
        plan_of(rollouts(config), config, setup_of({1, world().size(), 1}), 4);
      });
}

TEST(Scoring, WindowsOfTreesAreRefused) {
  ModelConfig config = test::small_config();
  config.layer_kinds = {{}, {.window = 3}};
  Documents documents;
  for (const int32_t last : {1, 2}) {
    for (const int32_t token : {5, 6, 7, last}) documents.tokens.push_back(token);
    documents.offsets.push_back(std::ssize(documents.tokens));
  }
  test::expect_usage(
      "documents that share a prefix, and a model whose layers have a window of 3 tokens: windows "
      "of trees are not supported",
      [&] {
        plan_of(documents, config, setup_of({1, world().size(), 1}), 1);
      });
}

// A prompt and its answers, stored once: the scores of every document are those of the documents
// by themselves, on every grid, under every layout and schedule.
TEST(Scoring, SharedPrefixesChangeNoScore) {
  const bool poisoned = poison_new_buffers(true);
  const ModelConfig config = test::small_config();
  const Documents documents = rollouts(config);
  const TwinScores twin = twin_scores(documents, config);
  const PrefixSavings savings =
      savings_of(plan_of(documents, config, setup_of({1, world().size(), 1}), 4).forest);
  EXPECT_LT(savings.trees, 7);
  EXPECT_LT(3 * savings.stored_tokens, 2 * savings.tokens);
  for (const GridShape& grid : all_grids(config))
    for (const int64_t min_prefix : {1, 4, 10})
      expect_right(documents, config, twin, setup_of(grid), min_prefix);
  size_t number = 0;
  for (const Schedule& schedule : schedules()) {
    size_t i = number++;
    for (const LayoutKind& layout : layout_kinds()) {
      if (!test::runs_combination(i++)) continue;
      const ScoringSetup setup = setup_of({1, world().size(), 1}, layout.name, schedule.name);
      if (refusal_of(documents, config, setup, 4).empty())
        expect_right(documents, config, twin, setup, 4);
      else
        EXPECT_EQ(schedule.name, "halo");
    }
  }
  poison_new_buffers(poisoned);
}

TEST(Scoring, OptionsOfLayoutsAndSchedulesArrive) {
  const ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  const TwinScores twin = twin_scores(documents, config);
  const int cp = world().size();
  ScoringSetup setup = setup_of({1, cp, 1}, "striped");
  setup.layout_options.stripe = 3;
  const ScoringPlan plan = plan_scoring(documents.offsets, config, setup, 48);
  EXPECT_EQ(plan.layout_of(plan.bins.front()).layout.shard(0).runs.front().length, 3);
  expect_right(documents, config, twin, setup);

  setup = setup_of({1, cp, 1}, "balanced-joint");
  setup.layout_options.chunk = 5;
  const ScoringPlan chunks = plan_scoring(documents.offsets, config, setup, 48);
  const BinLayout of_bin = chunks.layout_of(chunks.bins.front());
  for (const SlotRun& run : of_bin.layout.shard(0).runs) EXPECT_EQ(run.length % 5, 0);
  expect_right(documents, config, twin, setup);

  // Groups of one rank exchange no heads: KV blocks alone travel, as in a ring.
  setup = setup_of({1, cp, 1}, "contiguous", "all-to-all-ring");
  setup.schedule_options.inner = 1;
  const ScoringRun flat = score(documents, config, setup);
  const ScoringRun ring = score(documents, config, setup_of({1, cp, 1}, "contiguous"));
  EXPECT_EQ(flat.count.bytes_sent, ring.count.bytes_sent);
  setup.schedule_options.inner = cp;
  expect_right(documents, config, twin, setup);
  if (cp > 1) {
    EXPECT_NE(score(documents, config, setup).count.bytes_sent, ring.count.bytes_sent);
  }
}

TEST(Scoring, WhatAScheduleCannotDoIsRefusedBeforeItRuns) {
  const ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  const int cp = world().size();
  ScoringSetup setup = setup_of({1, cp, 1}, "contiguous", "all-to-all-ring");
  setup.schedule_options.inner = cp + 1;
  ProcessGrid grid(world(), setup.grid);
  const ScoringPlan plan = plan_scoring(documents.offsets, config, setup, 48);
  test::expect_usage(
      fmt::format("schedule all-to-all-ring: an inner group of {} of {} ranks; the nearest valid "
                  "one is {}",
                  cp + 1, cp, cp),
      [&] { Scorer(documents.view(), config, plan, grid); });
}

TEST(Scoring, TheSameRunTwiceGivesTheSameBits) {
  const ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  const GridShape grid =
      nearest_grids({1, 2, 2}, world().size(), allowed_tensor_parallel(config, 8)).front();
  for (const Schedule& schedule : schedules()) {
    const ScoringSetup setup = setup_of(grid, "dual-chunk-swap", schedule.name);
    if (!refusal_of(documents, config, setup).empty()) continue;
    const ScoringRun a = score(documents, config, setup), b = score(documents, config, setup);
    EXPECT_EQ(0, std::memcmp(a.range.logprob.data(), b.range.logprob.data(),
                             a.range.logprob.size() * sizeof(float)))
        << schedule.name;
    EXPECT_EQ(0, std::memcmp(a.range.entropy.data(), b.range.entropy.data(),
                             a.range.entropy.size() * sizeof(float)))
        << schedule.name;
  }
}

TEST(Scoring, DocumentSumsCoverAllPredictions) {
  const ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  const ScoringRun run = score(documents, config, setup_of({1, world().size(), 1}));
  const auto offsets = prediction_offsets(documents.offsets);
  const auto scores = score_documents(run.range, offsets, {}, world());
  ASSERT_EQ(std::ssize(scores), documents.view().size());
  double sum = 0, mine = 0;
  for (size_t d = 0; d < scores.size(); ++d) {
    sum += scores[d].logprob;
    EXPECT_EQ(scores[d].predictions, offsets[d + 1] - offsets[d]);
  }
  for (float x : run.range.logprob) mine += static_cast<double>(x);
  HostStream stream;
  world().all_reduce(&mine, 1, DType::f64, ReduceOp::sum, stream, "sum")->wait();
  EXPECT_NEAR(sum, mine, 1e-9 * std::abs(sum));
}

TEST(Scoring, NoDocumentsAndOnlyEmptyOnes) {
  const ModelConfig config = test::small_config();
  Documents none, empty;
  empty.offsets = {0, 0, 0};
  for (const Documents* documents : {&none, &empty})
    for (const LayoutKind& layout : layout_kinds()) {
      const ScoringRun run =
          score(*documents, config, setup_of({1, world().size(), 1}, layout.name));
      EXPECT_TRUE(run.range.logprob.empty()) << layout.name;
    }
}

}  // namespace GYRE_FILE
}  // namespace gyre
