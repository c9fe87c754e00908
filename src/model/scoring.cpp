#include "model/scoring.hpp"

#include <algorithm>
#include <limits>

#include "core/checksum.hpp"
#include "core/error.hpp"
#include "model/decoder_steps.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

/// One prediction on its way to document order; 16 bytes.
struct Scored {
  int64_t index;
  LogprobEntropy score;
};

int64_t share_begin(int64_t total, int ranks, int rank) {
  return total * rank / ranks;
}

int owner_of(int64_t index, int64_t total, int ranks) {
  int rank = static_cast<int>(index * ranks / total);
  while (share_begin(total, ranks, rank + 1) <= index) ++rank;
  while (share_begin(total, ranks, rank) > index) --rank;
  return rank;
}

}  // namespace

double linear_flops_per_token(const ModelConfig& c) {
  const int64_t layer =
      c.hidden_size * (2 * c.query_width() + 2 * c.kv_width() + 3 * c.intermediate_size);
  return 2.0 * static_cast<double>(c.num_hidden_layers * layer + c.hidden_size * c.vocab_size);
}

int64_t weight_bytes(const ModelConfig& c, int tp, DType type) {
  return static_cast<int64_t>(size_of(type)) * c.parameters() / tp;
}

int64_t activation_bytes(const ModelConfig& c, int tp, int64_t slots, DType type) {
  int64_t row = 0;
  for (const Activation a : {Activation::x, Activation::h, Activation::partial, Activation::gate,
                             Activation::up, Activation::logits})
    row += width_of(a, c, tp);
  return static_cast<int64_t>(size_of(type)) * slots * row;
}

int64_t ScoringSetup::slot_multiple() const {
  return layout->segment_multiple(grid.cp);
}

Layout ScoringSetup::layout_of(const PackedBatch& bin) const {
  LayoutOptions options = layout_options;
  options.cp = grid.cp;
  return layout->make(bin.bounds(), options);
}

AttentionProblem ScoringSetup::problem(const Layout& of_bin, const ModelConfig& config) const {
  return {&of_bin, local_heads(config, grid.tp), MaskKind::causal, schedule_options,
          PlanPasses::forward};
}

double ScoringPlan::flops(const ModelConfig& c) const {
  return linear_flops_per_token(c) * static_cast<double>(tokens) +
         static_cast<double>(c.num_hidden_layers) *
             attention_flops(Pass::forward, pairs * c.num_attention_heads, c.head_dim);
}

ScoringPlan plan_scoring(const DocumentView& documents, const ModelConfig& config,
                         const ScoringSetup& setup, int64_t bin_capacity) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < documents.size(); ++i) lengths.push_back(documents.length(i));
  ScoringPlan plan;
  plan.setup = setup;
  plan.capacity = bin_capacity;
  plan.bins = pack_documents(lengths, bin_capacity, setup.slot_multiple());
  plan.predictions = prediction_offsets(documents.offsets).back();
  std::vector<double> costs;
  for (const PackedBatch& bin : plan.bins) {
    const int64_t pairs = causal_pairs(bin);
    plan.tokens += bin.tokens();
    plan.pairs += pairs;
    costs.push_back(
        linear_flops_per_token(config) * static_cast<double>(bin.slots()) +
        static_cast<double>(config.num_hidden_layers) *
            attention_flops(Pass::forward, pairs * config.num_attention_heads, config.head_dim));
  }
  plan.bins_of_replica = balance_over_groups(costs, setup.grid.dp);
  return plan;
}

void add_bin(PlanCount& total, const PlanCount& bin) {
  total.pairs += bin.pairs;
  total.messages += bin.messages;
  total.bytes_sent += bin.bytes_sent;
  total.bytes_received += bin.bytes_received;
  total.transient_bytes = std::max(total.transient_bytes, bin.transient_bytes);
}

Scorer::Scorer(const DocumentView& documents, const ModelConfig& config, const ScoringPlan& plan,
               ProcessGrid& grid)
    : documents_(documents),
      plan_(plan),
      grid_(grid),
      heads_(local_heads(config, grid.shape().tp)) {
  const ScoringSetup& setup = plan.setup;
  GYRE_CHECK(setup.grid == grid.shape(), "a plan for {} on {}", to_string(setup.grid),
             to_string(grid.shape()));
  const int rank = grid.cp_rank();
  for (int64_t index : plan.bins_of_replica[static_cast<size_t>(grid.dp_rank())]) {
    const PackedBatch& bin = plan.bins[static_cast<size_t>(index)];
    std::vector<std::span<const int32_t>> texts;
    for (int64_t document : bin.documents) texts.push_back(documents.document(document));
    const Layout layout = setup.layout_of(bin);
    BinShard shard;
    shard.bin = index;
    shard.shard = layout.shard(rank);
    shard.batch = make_local_batch(layout, bin.bounds(), texts, rank);
    shard.plan = plan_rank(*setup.schedule, setup.problem(layout, config), rank);
    shard.scores.resize(shard.batch.tokens.size());
    shards_.push_back(std::move(shard));
  }
}

PlanCount Scorer::count() const {
  PlanCount total;
  for (const BinShard& shard : shards_)
    add_bin(total, gyre::count(shard.plan, Pass::forward, heads_, attention_types));
  return total;
}

DecoderTimes Scorer::run(
    Decoder& decoder,
    const std::function<void(const BinShard&, int64_t index, MatrixView<const float> x)>& observe) {
  DecoderTimes times;
  for (BinShard& shard : shards_) {
    if (progress_) progress_(&shard - shards_.data(), std::ssize(shards_));
    HiddenObserver hidden;
    if (observe)
      hidden = [&](int64_t index, MatrixView<const float> x) { observe(shard, index, x); };
    times += decoder.forward(shard.batch, shard.plan, shard.scores, hidden);
  }
  return times;
}

void Scorer::for_each_run(const BinShard& shard,
                          const std::function<void(const DocumentRun&)>& f) const {
  const PackedBatch& bin = plan_.bins[static_cast<size_t>(shard.bin)];
  for (const Fragment& fragment : shard.shard.fragments)
    f({bin.documents[static_cast<size_t>(fragment.segment.value())], fragment.start.value(),
       fragment.stride, fragment.length, fragment.local_begin.value()});
}

uint64_t Scorer::checksum() const {
  Checksum sum;
  for (const BinShard& shard : shards_)
    for_each_run(shard, [&](const DocumentRun& run) {
      const int64_t predictions = documents_.length(run.document) - 1;
      for (int64_t i = 0; i < run.length && run.start + i * run.stride < predictions; ++i)
        sum.add(std::as_bytes(std::span(&shard.scores[static_cast<size_t>(run.slot + i)], 1)));
    });
  return sum.value();
}

ScoreRange Scorer::in_document_order(Communicator& world) const {
  set_current_step("back to document order");
  const int ranks = world.size();
  const std::vector<int64_t> offsets = prediction_offsets(documents_.offsets);
  const int64_t total = offsets.back();
  std::vector<std::vector<Scored>> outgoing(static_cast<size_t>(ranks));
  for (const BinShard& shard : shards_) {
    if (grid_.tp_rank() != 0) break;  // all ranks of a tensor-parallel group hold the same scores
    for_each_run(shard, [&](const DocumentRun& run) {
      const int64_t first = offsets[static_cast<size_t>(run.document)];
      const int64_t predictions = documents_.length(run.document) - 1;
      for (int64_t i = 0; i < run.length; ++i) {
        const int64_t position = run.start + i * run.stride;
        if (position >= predictions) break;
        const int64_t index = first + position;
        outgoing[static_cast<size_t>(owner_of(index, total, ranks))].push_back(
            {index, shard.scores[static_cast<size_t>(run.slot + i)]});
      }
    });
  }
  std::vector<Scored> send;
  std::vector<int64_t> send_bytes;
  for (const auto& part : outgoing) {
    send.insert(send.end(), part.begin(), part.end());
    send_bytes.push_back(std::ssize(part) * static_cast<int64_t>(sizeof(Scored)));
  }
  HostStream stream;
  std::vector<int64_t> recv_bytes(static_cast<size_t>(ranks));
  world
      .all_to_all(bytes_of(std::span<const int64_t>(send_bytes)),
                  writable_bytes_of(std::span<int64_t>(recv_bytes)), stream, "counts of scores")
      ->wait();
  ScoreRange mine;
  mine.begin = share_begin(total, ranks, world.rank());
  const auto size = static_cast<size_t>(share_begin(total, ranks, world.rank() + 1) - mine.begin);
  std::vector<Scored> received(size);
  world
      .all_to_all_v(bytes_of(std::span<const Scored>(send)), send_bytes,
                    writable_bytes_of(std::span<Scored>(received)), recv_bytes, stream, "scores")
      ->wait();
  mine.logprob.assign(size, std::numeric_limits<float>::quiet_NaN());
  mine.entropy.assign(size, std::numeric_limits<float>::quiet_NaN());
  for (const Scored& scored : received) {
    const auto i = static_cast<size_t>(scored.index - mine.begin);
    mine.logprob.at(i) = scored.score.logprob;
    mine.entropy.at(i) = scored.score.entropy;
  }
  return mine;
}

std::vector<DocumentScore> score_documents(const ScoreRange& mine, std::span<const int64_t> offsets,
                                           Communicator& world) {
  const int64_t documents = std::ssize(offsets) - 1;
  std::vector<double> sums(static_cast<size_t>(2 * documents), 0);
  auto document = static_cast<size_t>(std::upper_bound(offsets.begin(), offsets.end(), mine.begin) -
                                      offsets.begin());
  for (int64_t i = mine.begin; i < mine.end(); ++i) {
    while (offsets[document] <= i) ++document;  // offsets[document] is the end of document - 1
    sums[2 * (document - 1)] +=
        static_cast<double>(mine.logprob[static_cast<size_t>(i - mine.begin)]);
    sums[2 * (document - 1) + 1] +=
        static_cast<double>(mine.entropy[static_cast<size_t>(i - mine.begin)]);
  }
  HostStream stream;
  world
      .all_reduce(sums.data(), std::ssize(sums), DType::f64, ReduceOp::sum, stream,
                  "sums over documents")
      ->wait();
  std::vector<DocumentScore> scores;
  for (size_t d = 0; d < static_cast<size_t>(documents); ++d)
    scores.push_back({sums[2 * d], sums[2 * d + 1], offsets[d + 1] - offsets[d]});
  return scores;
}

}  // namespace gyre
