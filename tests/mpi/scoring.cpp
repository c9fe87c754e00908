// The whole scoring path on every grid of the world's size against the decoder's serial twin.

#include "model/scoring.hpp"

#include <cstring>
#include <random>

#include "model/decoder_reference.hpp"
#include "mpi_test.hpp"
#include "random_model.hpp"

namespace gyre {
namespace {

using test::world;

struct Documents {
  std::vector<int32_t> tokens;
  std::vector<int64_t> offsets = {0};
  DocumentView view() const { return {tokens, offsets}; }
};

/// Empty, of one and two tokens, shorter than 2·cp, longer than the bin (48).
Documents ragged_documents(const ModelConfig& config) {
  Documents documents;
  std::mt19937 generator(5);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(config.vocab_size) - 1);
  for (int64_t length : {0, 1, 2, 3, 7, 16, 31, 48, 49, 0, 100, 1, 5}) {
    for (int64_t i = 0; i < length; ++i) documents.tokens.push_back(token(generator));
    documents.offsets.push_back(std::ssize(documents.tokens));
  }
  return documents;
}

struct ScoringRun {
  ScoreRange range;
  PlanCount count;
  ScoringPlan plan;
  int64_t cp_bytes = 0;
};

ScoringRun score(const Documents& documents, const ModelConfig& config, const GridShape& shape) {
  ProcessGrid grid(world(), shape);
  HostStream stream;
  const auto kernel = make_cpu_kernel();
  Decoder decoder(config,
                  load_weights(config, shape.tp, grid.tp_rank(), test::random_weights(config)),
                  grid, *kernel, stream);
  ScoringRun run;
  run.plan = plan_scoring(documents.view(), config, shape, 48);
  Scorer scorer(documents.view(), run.plan, find_schedule("ring"), grid);
  scorer.run(decoder);
  run.cp_bytes = grid.cp().traffic().bytes_sent;
  run.count = scorer.count();
  run.range = scorer.in_document_order();
  return run;
}

TEST(Scoring, EveryGridEqualsTheSerialTwin) {
  const bool poisoned = poison_new_buffers(true);
  const ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  const DecoderWeights whole = load_weights(config, 1, 0, test::random_weights(config));
  std::vector<double> logprob, entropy;
  for (int64_t d = 0; d < documents.view().size(); ++d) {
    const ReferenceScores scores =
        score_document_reference(config, whole, documents.view().document(d));
    logprob.insert(logprob.end(), scores.logprob.begin(), scores.logprob.end());
    entropy.insert(entropy.end(), scores.entropy.begin(), scores.entropy.end());
  }
  int grids = 0;
  for (const GridShape& shape :
       nearest_grids({1, 1, 1}, world().size(), allowed_tensor_parallel(config, 8))) {
    const ScoringRun run = score(documents, config, shape);
    ASSERT_EQ(prediction_offsets(documents.offsets).back(), std::ssize(logprob));
    double worst = 0;
    for (int64_t i = run.range.begin; i < run.range.end(); ++i) {
      const auto at = static_cast<size_t>(i - run.range.begin), all = static_cast<size_t>(i);
      const double error =
          std::max(std::abs(static_cast<double>(run.range.logprob[at]) - logprob[all]),
                   std::abs(static_cast<double>(run.range.entropy[at]) - entropy[all]));
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
    EXPECT_LE(worst, 2e-5) << to_string(shape);
    ++grids;
  }
  EXPECT_GE(grids, 1);
  poison_new_buffers(poisoned);
}

TEST(Scoring, TheSameRunTwiceGivesTheSameBits) {
  const ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  const GridShape shape =
      nearest_grids({1, 2, 2}, world().size(), allowed_tensor_parallel(config, 8)).front();
  const ScoringRun a = score(documents, config, shape), b = score(documents, config, shape);
  EXPECT_EQ(0, std::memcmp(a.range.logprob.data(), b.range.logprob.data(),
                           a.range.logprob.size() * sizeof(float)));
  EXPECT_EQ(0, std::memcmp(a.range.entropy.data(), b.range.entropy.data(),
                           a.range.entropy.size() * sizeof(float)));
}

TEST(Scoring, WireBytesEqualThePlan) {
  const ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  for (const GridShape& shape :
       nearest_grids({1, 1, 1}, world().size(), allowed_tensor_parallel(config, 8))) {
    const ScoringRun run = score(documents, config, shape);
    const int64_t token_bytes = 2 * config.kv_width() / shape.tp * 4;
    EXPECT_EQ(run.cp_bytes, run.count.tokens_sent * token_bytes * config.num_hidden_layers)
        << to_string(shape);
  }
}

TEST(Scoring, DocumentSumsCoverAllPredictions) {
  const ModelConfig config = test::small_config();
  const Documents documents = ragged_documents(config);
  const ScoringRun run = score(documents, config, {1, world().size(), 1});
  const auto offsets = prediction_offsets(documents.offsets);
  const auto scores = score_documents(run.range, offsets, world());
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
  for (const Documents* documents : {&none, &empty}) {
    const ScoringRun run = score(*documents, config, {1, world().size(), 1});
    EXPECT_TRUE(run.range.logprob.empty());
  }
}

}  // namespace
}  // namespace gyre
