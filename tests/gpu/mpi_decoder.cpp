// The decoder on a device, on every grid of the world's size, against its serial twin. All ranks
// share the GPU and communicate by way of the host. mpi/scoring.cpp has more documents, layouts and
// schedules: a bin costs seconds on the software GPU.

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention/kernels/cuda_kernel.hpp"
#include "comm/agree.hpp"
#include "comm/cuda_device.hpp"
#include "comm/staged.hpp"
#include "gpu_test.hpp"
#include "model/decoder_reference.hpp"
#include "model/scoring.hpp"
#include "model/tolerance.hpp"
#include "mpi_test.hpp"
#include "random_model.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::world;

struct Documents {
  std::vector<int32_t> tokens;
  std::vector<int64_t> offsets = {0};
  DocumentView view() const { return {tokens, offsets}; }
};
constexpr int64_t bin = 24;
constexpr int64_t longest = 25;

/// Half the heads of small_config: two tensor-parallel ranks at most.
ModelConfig device_config(int64_t layers) {
  ModelConfig config = test::small_config();
  config.num_hidden_layers = layers;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  return config;
}

/// Empty, of one token, longer than a bin. Two bins for 1 to 4 context-parallel ranks.
Documents ragged_documents(const ModelConfig& config) {
  Documents documents;
  std::mt19937 generator(5);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(config.vocab_size) - 1);
  for (const int64_t length : {0, 1, 7, int{longest}}) {
    for (int64_t i = 0; i < length; ++i) documents.tokens.push_back(token(generator));
    documents.offsets.push_back(std::ssize(documents.tokens));
  }
  return documents;
}

/// A prompt with answers, one of them empty and one that goes on in two ways.
Documents rollouts(const ModelConfig& config) {
  Documents documents;
  const auto add = [&](std::initializer_list<std::pair<int, int>> parts) {  // seed, length
    for (const auto& [seed, length] : parts) {
      std::mt19937 generator(static_cast<unsigned>(seed));
      std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(config.vocab_size) - 1);
      for (int i = 0; i < length; ++i) documents.tokens.push_back(token(generator));
    }
    documents.offsets.push_back(std::ssize(documents.tokens));
  };
  add({{1, 5}, {2, 2}});
  add({{1, 5}});
  add({{1, 5}, {3, 3}, {4, 1}});
  add({{1, 5}, {3, 3}, {5, 2}});
  return documents;
}

/// What the serial twin says of all predictions, and the residual stream of all tokens.
struct Twin {
  std::vector<double> logprob, entropy;
  std::vector<std::vector<double>> x;  // [layers + 1][tokens · hidden]
};

Twin twin_of(const Documents& documents, const ModelConfig& config, DType type = DType::f32) {
  const DecoderWeights whole =
      load_weights(config, 1, 0, test::random_weights(config), type).widened();
  Twin all;
  all.x.resize(static_cast<size_t>(config.num_hidden_layers) + 1);
  for (int64_t d = 0; d < documents.view().size(); ++d) {
    const ReferenceScores scores = score_document_reference(
        config, whole, documents.view().document(d), [&](int64_t index, std::span<const double> x) {
          all.x[static_cast<size_t>(index)].insert(all.x[static_cast<size_t>(index)].end(),
                                                   x.begin(), x.end());
        });
    all.logprob.insert(all.logprob.end(), scores.logprob.begin(), scores.logprob.end());
    all.entropy.insert(all.entropy.end(), scores.entropy.begin(), scores.entropy.end());
  }
  return all;
}

DecoderShape shape_of(const ModelConfig& config, int64_t layers, const ScoringSetup& setup) {
  DecoderShape shape = decoder_shape(config, layers, longest, setup.grid.cp);
  shape.tp = setup.grid.tp;
  shape.activations = setup.types.activations;
  shape.residual = setup.types.residual;
  return shape;
}

double tolerance_of_scores(const ModelConfig& config, const Twin& twin, const ScoringSetup& setup) {
  double size = 1;
  for (const double x : twin.logprob) size = std::max(size, std::abs(x));
  return score_tolerance(shape_of(config, config.num_hidden_layers, setup), size);
}

/// Expects the residual stream of one bin to be the twin's; rows are counted.
int64_t expect_hidden(const BinShard& shard, int64_t index, MatrixView<const float> x,
                      const Documents& documents, const Twin& twin, double tolerance) {
  int64_t rows = 0;
  for (const DocumentRun& run : shard.tokens)
    for (int64_t i = 0; i < run.length; ++i, ++rows) {
      const int64_t token = documents.offsets[static_cast<size_t>(run.documents.front())] +
                            run.start + i * run.stride;
      const std::span<const double> want =
          std::span(twin.x[static_cast<size_t>(index)])
              .subspan(static_cast<size_t>(token * x.cols), static_cast<size_t>(x.cols));
      double squares = 0;
      for (const double v : want) squares += v * v;
      const double rms = std::sqrt(squares / static_cast<double>(x.cols));
      for (int64_t c = 0; c < x.cols; ++c)
        EXPECT_NEAR(static_cast<double>(x(run.row + i, c)), want[static_cast<size_t>(c)],
                    tolerance * rms)
            << "layer " << index << " token " << token << " channel " << c;
    }
  return rows;
}

class DeviceDecoder : public test::GpuTest {
 protected:
  void SetUp() override {
    std::string why;
    if (usable_cuda_devices(&why) == 0) GTEST_SKIP() << why;
    bind_device(world(), true);
    GpuTest::SetUp();
    poisoned_ = poison_new_buffers(true);
    device_world_ = make_staged_communicator(world());
    kernel_ = make_cuda_kernel(stream());
  }
  void TearDown() override {
    if (device_world_) poison_new_buffers(poisoned_);
  }
  Communicator& device_world() { return *device_world_; }
  BlockKernel& kernel() { return *kernel_; }

  /// Scores all documents, and holds residual streams and scores against the twin's. Then scores
  /// them unobserved, if `twice`, and expects the same bits.
  void expect_right(const Documents& documents, const ModelConfig& config, const Twin& twin,
                    const ScoringSetup& setup, bool twice = false, int64_t min_prefix = 0) {
    SCOPED_TRACE(to_string(setup.grid) + " " + setup.layout->name + " " + setup.schedule->name);
    ProcessGrid grid(device_world(), setup.grid);
    const ScoringPlan plan =
        plan_scoring(documents.offsets,
                     min_prefix > 0 ? share_prefixes(documents.view(), {min_prefix, bin})
                                    : separate_documents(documents.offsets),
                     config, setup, bin);
    EXPECT_EQ(plan.forest.shares(), min_prefix > 0);
    Scorer scorer(documents.view(), config, plan, grid);
    Decoder decoder(config, setup.types,
                    load_weights(config, setup.grid.tp, grid.tp_rank(),
                                 test::random_weights(config), setup.types.activations),
                    grid, kernel(), stream());
    int64_t rows = 0;
    const DecoderTimes times =
        scorer.run(decoder, [&](const BinShard& shard, int64_t index, MatrixView<const float> x) {
          rows += expect_hidden(shard, index, x, documents, twin,
                                hidden_tolerance(shape_of(config, index, setup)));
        });
    const ScoreRange first = expect_scores(scorer, times, config, twin, setup);
    const int64_t all = all_reduce_value(world(), rows, ReduceOp::sum);
    EXPECT_EQ(all, setup.grid.tp * (config.num_hidden_layers + 1) * plan.tokens);
    if (!twice) return;
    const ScoreRange second = expect_scores(scorer, scorer.run(decoder), config, twin, setup);
    EXPECT_EQ(first.logprob, second.logprob);
    EXPECT_EQ(first.entropy, second.entropy);
  }

  static ScoreRange expect_scores(Scorer& scorer, const DecoderTimes& times,
                                  const ModelConfig& config, const Twin& twin,
                                  const ScoringSetup& setup) {
    for (const double seconds :
         {times.linear, times.attention, times.head, times.attention_wait, times.tp_wait})
      EXPECT_GE(seconds, 0);
    EXPECT_TRUE(times.linear > 0 || scorer.shards().empty());
    const ScoreRange mine = scorer.in_document_order(world());
    const double tolerance = tolerance_of_scores(config, twin, setup);
    for (int64_t i = mine.begin; i < mine.end(); ++i) {
      const auto at = static_cast<size_t>(i - mine.begin), all = static_cast<size_t>(i);
      EXPECT_NEAR(static_cast<double>(mine.logprob[at]), twin.logprob[all], tolerance);
      EXPECT_NEAR(static_cast<double>(mine.entropy[at]), twin.entropy[all], tolerance);
    }
    return mine;
  }

 private:
  bool poisoned_ = false;
  std::unique_ptr<Communicator> device_world_;
  std::unique_ptr<BlockKernel> kernel_;
};

/// All grids of the world's size, the one nearest to two context-parallel times two tensor-parallel
/// ranks first.
std::vector<GridShape> grids(const ModelConfig& config) {
  return nearest_grids({1, 2, 2}, world().size(), allowed_tensor_parallel(config, 4));
}

TEST_F(DeviceDecoder, EveryGridEqualsTheSerialTwinAndTheFirstAgainBitByBit) {
  const ModelConfig config = device_config(2);
  const Documents documents = ragged_documents(config);
  const Twin twin = twin_of(documents, config);
  bool twice = true;
  for (const GridShape& grid : grids(config)) {
    expect_right(documents, config, twin,
                 {grid, &find_layout("dual-chunk-swap"), {}, &find_schedule("ring"), {}}, twice);
    twice = false;
  }
}

TEST_F(DeviceDecoder, SchedulesAndLayoutsEqualTheSerialTwin) {
  const ModelConfig config = device_config(1);
  const Documents documents = ragged_documents(config);
  const Twin twin = twin_of(documents, config);
  const GridShape grid = {1, world().size(), 1};
  for (const auto& [layout, schedule] : {std::pair{"striped", "all-gather"},
                                         {"contiguous", "all-to-all"},
                                         {"balanced-joint", "group-cast"}})
    expect_right(documents, config, twin,
                 {grid, &find_layout(layout), {}, &find_schedule(schedule), {}});
}

TEST_F(DeviceDecoder, EveryFeatureOfLayersEqualsTheSerialTwin) {
  ModelConfig config = device_config(2);
  config.rotary_dim = 6;
  config.rope_scaling = {.type = RopeType::yarn,
                         .factor = 4,
                         .original_max_position_embeddings = 16,
                         .attention_factor = 1.25};
  config.qkv_bias = config.output_bias = config.qk_norm = config.tied_head = true;
  config.layer_kinds = {{.rotary = false}, {.window = 5}};
  config.hidden_act = GateActivation::gelu;
  config.attention_sinks = config.output_gate = true;
  config.final_soft_cap = 5;
  const Documents documents = ragged_documents(config);
  expect_right(
      documents, config, twin_of(documents, config),
      {grids(config).front(), &find_layout("dual-chunk-swap"), {}, &find_schedule("ring"), {}});
}

TEST_F(DeviceDecoder, Bf16PassesAreNearTheTwinOfTheRoundedWeights) {
  const ModelConfig config = device_config(2);
  const Documents documents = ragged_documents(config);
  const Twin twin = twin_of(documents, config, DType::bf16);
  ScoringSetup setup = {
      grids(config).front(), &find_layout("dual-chunk-swap"), {}, &find_schedule("ring"), {}};
  for (const DType residual : {DType::f32, DType::bf16}) {
    setup.types = {DType::bf16, residual};
    expect_right(documents, config, twin, setup, residual == DType::f32);
  }
}

TEST_F(DeviceDecoder, SharedPrefixesChangeNoScore) {
  const ModelConfig config = device_config(1);
  const Documents documents = rollouts(config);
  expect_right(
      documents, config, twin_of(documents, config),
      {grids(config).front(), &find_layout("dual-chunk-swap"), {}, &find_schedule("ring"), {}},
      false, 3);
}

}  // namespace GYRE_FILE
}  // namespace gyre
