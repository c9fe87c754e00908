// Documents become a packed stream, which a layout deals to the ranks. Ring attention over it is
// counted before anything runs. Then the ranks, each with a part of the vocabulary, compute
// log-probabilities. Both are compared with what they should be.

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention/schedules/registry.hpp"
#include "comm/mpi.hpp"
#include "core/token_random.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_parallel.hpp"
#include "packing/packing.hpp"
#include "runtime/mpi_env.hpp"
#include "sharding/layouts.hpp"
#include "supervision/supervision.hpp"

/// Layouts and plans are data: any process can ask for those of any rank.
bool shard_and_count(int cp, bool print) {
  const std::vector<int64_t> documents = {16, 8, 4};
  const gyre::PackedBatch stream = gyre::pack_documents(documents, 32 * cp, 2 * cp).front();
  const gyre::Layout layout = gyre::dual_chunk_swap(stream.bounds(), cp);
  const gyre::AttentionProblem problem{
      .layout = &layout, .heads = {.heads = 8, .kv_heads = 2, .head_dim = 64, .scale = 0.125F}};
  int64_t pairs = 0, expected = 0;
  for (int rank = 0; rank < cp; ++rank) {
    const gyre::RankPlan plan = gyre::plan_rank(gyre::find_schedule("ring"), problem, rank);
    const gyre::PlanCount forward = gyre::count(plan, gyre::Pass::forward, problem.heads, {});
    pairs += forward.pairs;
    if (print)
      fmt::print("rank {}: {} pairs, messages sent: {}, bytes: {}, slots: {}\n", rank,
                 forward.pairs, forward.messages, forward.bytes_sent,
                 fmt::join(gyre::shard_index(layout, rank), " "));
  }
  for (const int64_t length : documents)
    expected += problem.heads.heads * gyre::visible_pairs(length, problem.mask);
  if (print) fmt::print("{} pairs, {} in the documents\n", pairs, expected);
  return pairs == expected;
}

/// Every rank has some columns of the logits; all of them get the log-probabilities.
bool score(gyre::Communicator& tp, bool print) {
  const int64_t tokens = 64, ids = 1000;
  std::vector<float> values(tokens * ids);
  const gyre::MatrixView<float> logits(values.data(), tokens, ids);
  std::vector<int32_t> targets;
  for (int64_t t = 0; t < tokens; ++t) {
    gyre::fill_token_row({.tensor = gyre::TokenTensor::logits}, t, {logits.row(t), ids});
    targets.push_back(static_cast<int32_t>(37 * t % ids));
  }
  const gyre::VocabPartition vocab = gyre::balanced_partition(ids, tp.size());
  const auto mine = logits.columns_from(vocab.begin(tp.rank()), vocab.columns(tp.rank()));
  gyre::VocabScores scores(tokens, vocab, {}, tp);
  gyre::HostStream stream;
  std::vector<float> logprob(tokens);
  scores.forward(mine, targets, stream, logprob, {});

  double error = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const std::vector<double> row(logits.row(t), logits.row(t) + ids);
    const double wanted = gyre::score_row_reference(row, targets[t]).logprob;
    error = std::max(error, std::abs(logprob[t] - wanted));
  }
  if (print) fmt::print("{} log-probabilities: largest error {:.0e}\n", tokens, error);
  return error < 1e-5;
}

int main(int argc, char** argv) {
  gyre::start_supervised("client", argc, argv);
  gyre::MpiEnvironment environment(argc, argv, "client");
  const auto world = gyre::make_mpi_communicator(environment.world());
  const bool first = world->rank() == 0;
  const bool counted = shard_and_count(world->size(), first);
  return score(*world, first) && counted ? 0 : 1;
}
