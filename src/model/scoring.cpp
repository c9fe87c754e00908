#include "model/scoring.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "attention/plan_size.hpp"
#include "core/checksum.hpp"
#include "core/error.hpp"
#include "model/decoder_steps.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

/// One score with its index in document order.
struct Scored {
  int64_t index;
  PredictionScore score;
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

/// Mask of layers with windows, or `causal` in layers without.
MaskRule mask_in(const MaskRule& causal, const LayerMask& layers) {
  return layers.window == 0 ? causal : MaskRule(MaskKind::causal, layers.window);
}

/// Visible pairs per head of each tree in layers with one mask.
std::vector<int64_t> pairs_of_trees(const PrefixForest& forest, const LayerMask& mask) {
  std::vector<int64_t> pairs;
  for (int64_t t = 0; t < forest.trees(); ++t)
    pairs.push_back(mask.window == 0
                        ? forest.pairs(t)
                        : visible_pairs(forest.tokens(t), {MaskKind::causal, mask.window}));
  return pairs;
}

void check_trees(const PrefixForest& forest, const std::vector<LayerMask>& masks,
                 int64_t recurrent_layers) {
  bool branches = false;
  for (int64_t t = 0; t < forest.trees(); ++t) branches |= forest.tree(t).size() > 1;
  if (!branches) return;
  for (const LayerMask& mask : masks)
    if (mask.window > 0)
      throw_usage(
          "documents that share a prefix, and a model whose layers have a window of {} tokens: "
          "windows of trees are not supported",
          mask.window);
  if (recurrent_layers > 0)
    throw_usage(
        "documents that share a prefix, and a model with {} recurrent layers: states of trees are "
        "not supported",
        recurrent_layers);
}

}  // namespace

double linear_flops_per_token(const ModelConfig& c) {
  const int64_t attention = (c.output_gate ? 3 : 2) * c.query_width() + 2 * c.kv_width();
  const int64_t recurrence = c.recurrent.projected() + c.recurrent.value_width();
  const int64_t recurrent = c.recurrent_layers();
  return 2.0 * c.hidden_size *
         ((c.num_hidden_layers - recurrent) * attention + recurrent * recurrence +
          c.num_hidden_layers * 3 * c.intermediate_size + c.vocab_size);
}

int64_t activation_bytes(const ModelConfig& c, int tp, const DecoderTypes& types, int64_t slots,
                         int64_t again) {
  const auto bytes = [&](Activation a) { return width_of(a, c, tp) * size_of(types.of(a)); };
  int64_t row = 0;
  for (const Activation a : activations_of_decoder) row += bytes(a);
  return slots * row + again * bytes(Activation::h) + recurrence_bytes(c, tp, slots);
}

int64_t ScoringSetup::slot_multiple() const {
  return std::lcm(layout->segment_multiple(grid.cp), recurrent_layout->segment_multiple(grid.cp));
}

BinLayout ScoringPlan::layout_of(const PackedBatch& bin) const {
  BinLayout result{mask_of(forest, bin.documents), {}, {}};
  LayoutOptions options = setup.layout_options;
  options.cp = setup.grid.cp;
  const bool windows =
      std::ranges::any_of(layout_masks, [](const LayerMask& m) { return m.window > 0; });
  if (windows || !result.mask.plain_causal())
    options.pairs = [&](int64_t segment, int64_t queries) {
      const int64_t length = forest.tokens(bin.documents[segment]);
      int64_t weight = 0;
      for (const LayerMask& m : layout_masks)
        weight += (windows ? m.layers : 1) *
                  DocumentMask(mask_in(result.mask, m), segment, length).pairs(queries);
      return weight;
    };
  result.layout = setup.layout->make(bin.bounds(), options);
  LayoutOptions usual;
  usual.cp = options.cp;
  if (recurrent_layers > 0) result.recurrent = setup.recurrent_layout->make(bin.bounds(), usual);
  return result;
}

AttentionProblem ScoringPlan::problem(const BinLayout& of_bin, const ModelConfig& config,
                                      size_t mask) const {
  return {&of_bin.layout, local_heads(config, setup.grid.tp), mask_in(of_bin.mask, masks[mask]),
          setup.schedule_options, PlanPasses::forward};
}

RecurrentProblem ScoringPlan::recurrent_problem(const BinLayout& of_bin,
                                                const ModelConfig& config) const {
  return {of_bin.layout, of_bin.recurrent, *setup.state_schedule,
          config,        setup.grid.tp,    setup.types.activations};
}

double ScoringPlan::flops(const ModelConfig& c) const {
  double flops = linear_flops_per_token(c) * tokens;
  if (recurrent_layers > 0)
    flops += recurrent_layers * recurrence_flops(Pass::forward, tokens, recurrence_shape(c, 1));
  for (size_t m = 0; m < masks.size(); ++m)
    flops +=
        masks[m].layers *
        attention_flops(Pass::forward, pairs_of_mask[m] * c.num_attention_heads, local_heads(c, 1));
  return flops;
}

std::string name_of_choice(const ScoringPlan& plan) {
  const ScoringSetup& setup = plan.setup;
  std::string name = fmt::format("{} under {}", setup.schedule->name, setup.layout->name);
  if (plan.recurrent_layers > 0)
    name += fmt::format(", {} under {}", setup.state_schedule->name, setup.recurrent_layout->name);
  return name;
}

ScoringPlan plan_scoring(std::span<const int64_t> offsets, PrefixForest forest,
                         const ModelConfig& config, const ScoringSetup& setup,
                         int64_t bin_capacity) {
  ScoringPlan plan;
  plan.setup = setup;
  plan.forest = std::move(forest);
  plan.capacity = bin_capacity;
  plan.bins = pack_documents(plan.forest.lengths(), bin_capacity, setup.slot_multiple());
  plan.predictions = prediction_offsets(offsets).back();
  plan.masks = plan.layout_masks = layer_masks(config);
  plan.recurrent_layers = config.recurrent_layers();
  check_trees(plan.forest, plan.masks, plan.recurrent_layers);
  std::vector<double> pairs_of_layers(plan.forest.trees(), 0);  // of a tree, over all layers
  for (const LayerMask& mask : plan.masks) {
    const std::vector<int64_t> pairs = pairs_of_trees(plan.forest, mask);
    plan.pairs_of_mask.push_back(pairs_of_heads(pairs, offsets.back(), config.num_attention_heads) /
                                 config.num_attention_heads);
    plan.pairs += plan.pairs_of_mask.back();
    for (size_t t = 0; t < pairs.size(); ++t) pairs_of_layers[t] += mask.layers * pairs[t];
  }
  for (const PackedBatch& bin : plan.bins) {
    double pairs = 0;
    for (const int64_t tree : bin.documents) pairs += pairs_of_layers[tree];
    plan.tokens += bin.tokens();
    plan.bin_flops.push_back(
        linear_flops_per_token(config) * bin.slots() +
        pairs * attention_flops(Pass::forward, config.num_attention_heads, local_heads(config, 1)));
  }
  plan.bins_of_replica = balance_over_groups(plan.bin_flops, setup.grid.dp);
  return plan;
}

ScoringPlan plan_scoring(std::span<const int64_t> offsets, const ModelConfig& config,
                         const ScoringSetup& setup, int64_t bin_capacity) {
  return plan_scoring(offsets, separate_documents(offsets), config, setup, bin_capacity);
}

void check_scoring_size(const ScoringPlan& plan, std::span<const int64_t> offsets,
                        const ModelConfig& config, bool alike_once) {
  std::set<std::vector<int32_t>> boundaries;
  for (const PackedBatch& bin : plan.bins) boundaries.insert(bin.cu_seqlens_padded);
  const int64_t bins = alike_once ? std::ssize(boundaries) : std::ssize(plan.bins);
  const auto slots = [](const PackedBatch& bin) { return bin.cu_seqlens_padded.back(); };
  const auto estimate = [&](const ScoringPlan& of_ranks) -> int64_t {
    if (of_ranks.bins.empty()) return 0;
    const BinLayout largest =
        of_ranks.layout_of(*std::ranges::max_element(of_ranks.bins, {}, slots));
    int64_t entries = 0;
    for (size_t m = 0; m < of_ranks.masks.size(); ++m)
      entries += estimated_entries(*plan.setup.schedule, of_ranks.problem(largest, config, m));
    return bins * entries;
  };
  const int cp = plan.setup.grid.cp;
  check_plan_size({*plan.setup.schedule, "counted", cp, plan.tokens}, max_streamed_entries,
                  [&](int ranks) {
                    if (ranks == cp) return estimate(plan);
                    ScoringSetup setup = plan.setup;
                    setup.grid.cp = ranks;
                    return estimate(plan_scoring(offsets, plan.forest, config, setup,
                                                 round_up(plan.capacity, setup.slot_multiple())));
                  });
}

void add_bin(PlanCount& total, const PlanCount& bin, int64_t layers) {
  total.pairs += layers * bin.pairs;
  total.messages += layers * bin.messages;
  total.bytes_sent += layers * bin.bytes_sent;
  total.bytes_received += layers * bin.bytes_received;
  total.transient_bytes = std::max(total.transient_bytes, bin.transient_bytes);
}

Scorer::Scorer(const DocumentView& documents, const ModelConfig& config, const ScoringPlan& plan,
               ProcessGrid& grid)
    : documents_(documents),
      config_(config),
      plan_(plan),
      grid_(grid),
      heads_(local_heads(config, grid.shape().tp)) {
  const ScoringSetup& setup = plan.setup;
  GYRE_CHECK(setup.grid == grid.shape(), "a plan for {} on {}", to_string(setup.grid),
             to_string(grid.shape()));
  const int rank = grid.cp_rank();
  for (int64_t index : plan.bins_of_replica[grid.dp_rank()]) {
    const PackedBatch& bin = plan.bins[index];
    std::vector<std::vector<int32_t>> streams;
    for (const int64_t tree : bin.documents)
      streams.push_back(tokens_of_tree(plan.forest, tree, documents));
    const std::vector<std::span<const int32_t>> texts(streams.begin(), streams.end());
    const BinLayout of_bin = plan.layout_of(bin);
    BinShard shard;
    shard.bin = index;
    shard.shard = of_bin.layout.shard(rank);
    shard.batch =
        make_local_batch(of_bin.layout, bin.bounds(), plan.forest, bin.documents, texts, rank);
    for (size_t m = 0; m < plan.masks.size(); ++m)
      shard.plans.attention.push_back(
          plan_rank(*setup.schedule, plan.problem(of_bin, config, m), rank));
    if (plan.recurrent_layers > 0) {
      const RecurrentProblem problem = plan.recurrent_problem(of_bin, config);
      shard.plans.recurrent = plan_recurrent(problem, rank);
      shard.recurrent_sent = plan.recurrent_layers * gyre::count(*shard.plans.recurrent, problem);
      shard.recurrent_expected = plan.recurrent_layers * expected_traffic(problem, rank);
    }
    shard.scores.resize(shard.batch.targets.size());
    shard.tokens = token_runs(plan.forest, bin.documents, shard.shard);
    shard.predictions = prediction_runs(plan.forest, bin.documents, shard.shard);
    shards_.push_back(std::move(shard));
  }
}

PlanCount Scorer::count() const {
  PlanCount total;
  const ElementTypes types = attention_types(plan_.setup.types, plan_.setup.grid.cp);
  for (const BinShard& shard : shards_)
    for (size_t m = 0; m < plan_.masks.size(); ++m)
      add_bin(total, gyre::count(shard.plans.attention[m], Pass::forward, heads_, types),
              plan_.masks[m].layers);
  return total;
}

RecurrentTraffic Scorer::recurrent_sent() const {
  RecurrentTraffic total;
  for (const BinShard& shard : shards_) total += shard.recurrent_sent;
  return total;
}

RecurrentTraffic Scorer::recurrent_expected() const {
  RecurrentTraffic total;
  for (const BinShard& shard : shards_) total += shard.recurrent_expected;
  return total;
}

PassWork Scorer::work() const {
  const ScoringSetup& setup = plan_.setup;
  const std::vector<DecoderStep> steps = decoder_steps(config_);
  PassWork work;
  for (const BinShard& shard : shards_)
    add_work(work, steps, config_, setup.grid.tp, setup.types, shard.shard.slots,
             std::ssize(shard.batch.targets));
  work.attention_flops = attention_flops(Pass::forward, count().pairs, local_heads(config_, 1));
  work.recurrent = plan_.recurrent_layers > 0;
  for (const BinShard& shard : shards_)
    if (work.recurrent)
      work.recurrence_flops += static_cast<double>(plan_.recurrent_layers) *
                               gyre::count(shard.plans.recurrent->states, Pass::forward,
                                           recurrence_shape(config_, setup.grid.tp))
                                   .flops;
  return work;
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
    times += decoder.forward(shard.batch, shard.plans, shard.scores, hidden, observe_head_);
    if (after_bin_) times += after_bin_(&shard - shards_.data(), shard.scores);
  }
  return times;
}

uint64_t Scorer::checksum() const {
  Checksum sum;
  for (const BinShard& shard : shards_)
    for (const DocumentRun& run : shard.predictions)
      sum.add(std::as_bytes(std::span(shard.scores).subspan(run.row, run.length)));
  return sum.value();
}

ScoreRange Scorer::in_document_order(Communicator& world) const {
  set_current_step("back to document order");
  const int ranks = world.size();
  const std::vector<int64_t> offsets = prediction_offsets(documents_.offsets);
  const int64_t total = offsets.back();
  // All ranks of a tensor-parallel group hold the same scores: one sends them.
  const auto for_each_score = [&](const auto& visit) {
    for (const BinShard& shard : shards_)
      for (const DocumentRun& run : shard.predictions)
        for (const int64_t document : run.documents)
          for (int64_t i = 0; i < run.length && grid_.tp_rank() == 0; ++i) {
            const int64_t index = offsets[document] + run.start + i * run.stride;
            visit(owner_of(index, total, ranks), Scored{index, shard.scores[run.row + i]});
          }
  };
  std::vector<int64_t> send_bytes(ranks);
  for_each_score([&](int owner, const Scored&) { send_bytes[owner] += sizeof(Scored); });
  std::vector<int64_t> next(ranks);
  std::exclusive_scan(send_bytes.begin(), send_bytes.end(), next.begin(), int64_t{0});
  std::vector<Scored> send((next.back() + send_bytes.back()) / sizeof(Scored));
  for (int64_t& bytes : next) bytes /= sizeof(Scored);
  for_each_score([&](int owner, const Scored& scored) { send[next[owner]++] = scored; });
  HostStream stream;
  std::vector<int64_t> recv_bytes(ranks);
  world
      .all_to_all(bytes_of(std::span<const int64_t>(send_bytes)),
                  writable_bytes_of(std::span<int64_t>(recv_bytes)), stream, "counts of scores")
      ->wait();
  ScoreRange mine;
  mine.begin = share_begin(total, ranks, world.rank());
  const size_t size = share_begin(total, ranks, world.rank() + 1) - mine.begin;
  std::vector<Scored> received(size);
  world
      .all_to_all_v(bytes_of(std::span<const Scored>(send)), send_bytes,
                    writable_bytes_of(std::span<Scored>(received)), recv_bytes, stream, "scores")
      ->wait();
  mine.logprob.assign(size, std::numeric_limits<float>::quiet_NaN());
  mine.entropy = mine.kl = mine.logprob;
  for (const Scored& scored : received) {
    const size_t i = scored.index - mine.begin;
    mine.logprob.at(i) = scored.score.logprob;
    mine.entropy.at(i) = scored.score.entropy;
    mine.kl.at(i) = scored.score.kl;
  }
  return mine;
}

std::vector<DocumentScore> score_documents(const ScoreRange& mine, std::span<const int64_t> offsets,
                                           std::span<const int64_t> unscored, Communicator& world) {
  const int64_t documents = std::ssize(offsets) - 1;
  std::vector<double> sums(3 * documents, 0);
  size_t document = std::upper_bound(offsets.begin(), offsets.end(), mine.begin) - offsets.begin();
  for (int64_t i = mine.begin; i < mine.end(); ++i) {
    while (offsets[document] <= i) ++document;  // offsets[document] is the end of document - 1
    if (!unscored.empty() && i < offsets[document - 1] + unscored[document - 1]) continue;
    double* sum = &sums[3 * (document - 1)];
    sum[0] += mine.logprob[i - mine.begin];
    sum[1] += mine.entropy[i - mine.begin];
    sum[2] += mine.kl[i - mine.begin];
  }
  HostStream stream;
  world
      .all_reduce(sums.data(), std::ssize(sums), DType::f64, ReduceOp::sum, stream,
                  "sums over documents")
      ->wait();
  std::vector<DocumentScore> scores;
  for (int64_t d = 0; d < documents; ++d)
    scores.push_back({sums[3 * d], sums[3 * d + 1], sums[3 * d + 2],
                      offsets[d + 1] - offsets[d] - (unscored.empty() ? 0 : unscored[d])});
  return scores;
}

}  // namespace gyre
