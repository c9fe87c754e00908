#include "report/tolerance.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "comm/agree.hpp"
#include "core/error.hpp"

namespace gyre {

double epsilon_of(DType type) {
  switch (type) {
    case DType::f32:
      return std::numeric_limits<float>::epsilon();
    case DType::bf16:
      return 0x1p-7;
    case DType::f64:
      return std::numeric_limits<double>::epsilon();
    case DType::i32:
    case DType::i64:
      return 0;
  }
  return 0;
}

double storage_scale(DType stored, double tolerance) {
  return stored == DType::bf16 ? epsilon_of(DType::bf16) / 2 / tolerance : 0;
}

CommonErrors common_error_limits(double sigma, double values, double squares) {
  const double few = 1 / std::sqrt(values), bias = sigma * (0.3 + 4 * few);
  return {2 * sigma * (1 + 2 * few), bias, bias / std::sqrt(squares / values)};
}

double tolerance_for(DType type, int64_t roundings) {
  GYRE_CHECK(roundings >= 0, "{} roundings", roundings);
  const double sigma = epsilon_of(type) / 6 * std::sqrt(roundings);
  return tolerance_safety * sigma;
}

double attention_tolerance(int64_t head_dim, int64_t keys, int64_t merges) {
  return tolerance_for(DType::f32, head_dim + keys + roundings_per_merge * merges + 1);
}

namespace {

double tolerance_of(double f32_roundings, int64_t bf16_roundings) {
  const double narrow = epsilon_of(DType::bf16), wide = epsilon_of(DType::f32);
  return tolerance_safety / 6 *
         std::sqrt(wide * wide * f32_roundings + narrow * narrow * bf16_roundings);
}

/// Counts events per range of heads, and keeps the largest count. Ranges with the same begin are
/// the same range.
class MostPerHeads {
 public:
  void add(HeadRange heads) { most_ = std::max(most_, ++times_[heads.begin]); }
  int64_t most() const { return most_; }

 private:
  std::map<int64_t, int64_t> times_;
  int64_t most_ = 0;
};

/// The largest counts of roundings of one row, over the rows of one rank.
struct StepCounter {
  MostPerHeads partials, d_q_terms, hops, out_trips, d_q_trips;

  void add(const RankPlan& plan, const Step& any) {
    if (const auto* compute = std::get_if<step::Compute>(&any)) {
      if (compute->out >= 0) partials.add(compute->kv_heads);
      if (compute->d_q >= 0) d_q_terms.add(compute->kv_heads);
    }
    const auto* exchange = std::get_if<step::Exchange>(&any);
    if (exchange == nullptr) return;
    // A message's slices with one kind and range of heads are runs of rows of one array: one count.
    for (const Message& m : exchange->recvs) {
      if (m.peer == plan.rank) continue;
      std::set<std::pair<ArrayKind, int64_t>> seen;
      for (const Slice& slice : m.slices) {
        const ArrayKind kind = plan.arrays[slice.array].kind;
        if (!seen.insert({kind, slice.heads.begin}).second) continue;
        if (kind == ArrayKind::d_kv) hops.add(slice.heads);
        if (kind == ArrayKind::out) out_trips.add({m.peer, 0});
        if (kind == ArrayKind::d_q) d_q_trips.add({m.peer, 0});
      }
    }
  }
};

/// The counts that may differ between ranks.
constexpr std::array counts_of_ranks = {
    &AttentionReductions::partials, &AttentionReductions::d_q_terms, &AttentionReductions::hops,
    &AttentionReductions::out_trips, &AttentionReductions::d_q_trips};

/// Tokens of each document.
std::map<int64_t, int64_t> document_lengths(const Layout& layout) {
  std::map<int64_t, int64_t> lengths;
  for (const Shard& shard : layout.shards)
    for (const Fragment& fragment : shard.fragments) lengths[fragment.segment] += fragment.length;
  return lengths;
}

}  // namespace

AttentionReductions attention_reductions(const RankPlan& plan, const AttentionProblem& problem) {
  AttentionReductions lengths;
  lengths.head_dim = problem.heads.head_dim;
  lengths.value_dim = problem.heads.value_dim();
  for (const auto& [document, length] : document_lengths(*problem.layout)) {
    const DocumentMask mask(problem.mask, document, length);
    lengths.keys = std::max(lengths.keys, mask.max_keys());
    lengths.queries = std::max(lengths.queries, mask.max_queries() * problem.heads.group());
  }
  StepCounter counter;
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const Step& step : plan.steps(pass)) counter.add(plan, step);
  lengths.partials = std::max<int64_t>(1, counter.partials.most());
  lengths.d_q_terms = std::max<int64_t>(1, counter.d_q_terms.most());
  lengths.hops = counter.hops.most();
  lengths.out_trips = counter.out_trips.most();
  lengths.d_q_trips = counter.d_q_trips.most();
  return lengths;
}

AttentionReductions attention_reductions(const Plan& plan, const AttentionProblem& problem) {
  AttentionReductions lengths = attention_reductions(plan.ranks.at(0), problem);
  for (const RankPlan& rank : plan.ranks) {
    const AttentionReductions other = attention_reductions(rank, problem);
    for (const auto count : counts_of_ranks)
      lengths.*count = std::max(lengths.*count, other.*count);
  }
  return lengths;
}

AttentionReductions attention_reductions(const RankPlan& mine, const AttentionProblem& problem,
                                         Communicator& group) {
  AttentionReductions lengths = attention_reductions(mine, problem);
  std::array<int64_t, counts_of_ranks.size()> most{};
  for (size_t i = 0; i < most.size(); ++i) most.at(i) = lengths.*counts_of_ranks.at(i);
  HostStream stream;
  group
      .all_reduce(most.data(), std::ssize(most), DType::i64, ReduceOp::max, stream,
                  "lengths of reductions")
      ->wait();
  for (size_t i = 0; i < most.size(); ++i) lengths.*counts_of_ranks.at(i) = most.at(i);
  return lengths;
}

namespace {

/// bound(n_f32, n_bf16) for the roundings of each tensor.
template <class Bound>
AttentionTolerances from_roundings(const AttentionReductions& lengths, const ElementTypes& types,
                                   const KernelPrecision& kernel, Bound bound) {
  const double dim = lengths.head_dim, value_dim = lengths.value_dim, keys = lengths.keys;
  const double partials = lengths.partials;
  const double rows = lengths.queries + lengths.hops;
  const double log_keys = std::log(std::max(1.0, keys));
  const double largest_score = lengths.score_size * std::sqrt(2 * log_keys);
  const double lse = std::max(1 + log_keys, largest_score);
  const double out = dim * lengths.score_size * lengths.score_size + keys +
                     (roundings_per_merge + 3 * largest_score * largest_score) * partials + 1;
  const double p = out + 3 * lse * lse * partials;
  const auto narrow = [](DType type, int64_t n) { return type == DType::bf16 ? n : 0; };
  const auto inside = [&](int64_t results) {
    return (kernel.narrow_weights ? 1 : 0) + (kernel.narrow_results ? results : 0);
  };
  const int64_t narrow_out = narrow(types.partial_out, lengths.partials) + inside(lengths.partials);
  const int64_t narrow_d_kv = narrow(types.wire_d_kv, lengths.hops) + inside(lengths.hops + 1);
  AttentionTolerances t;
  t.out = bound(out, narrow_out + narrow(types.activations, lengths.out_trips));
  t.lse = bound(out, 0);
  t.d_q = bound(p + out + 2 * value_dim + keys, narrow_out + narrow(types.d_q, lengths.d_q_terms) +
                                                    inside(lengths.d_q_terms) +
                                                    narrow(types.activations, lengths.d_q_trips));
  t.d_k = bound(p + out + 2 * value_dim + rows, narrow_out + narrow_d_kv);
  // Each message rounds its sum over heads; the last sum rounds once more.
  t.d_k_shared = bound(p + out + 2 * value_dim + rows + lengths.hops + 1, narrow_out + narrow_d_kv);
  t.d_v = bound(p + rows, narrow_d_kv);
  t.d_sinks = bound(p + out + value_dim, narrow_out);
  return t;
}

}  // namespace

AttentionTolerances attention_tolerances(const AttentionReductions& lengths,
                                         const ElementTypes& types, const KernelPrecision& kernel) {
  return from_roundings(lengths, types, kernel, tolerance_of);
}

AttentionTolerances attention_sigmas(const AttentionReductions& lengths, const ElementTypes& types,
                                     const KernelPrecision& kernel) {
  const double rounding = narrow_deviation * epsilon_of(DType::bf16);
  return from_roundings(lengths, types, kernel, [&](double wide, int64_t narrow) {
    if (narrow == 0) return 0.0;
    return std::hypot(tolerance_of(wide, 0) / tolerance_safety, rounding * std::sqrt(narrow));
  });
}

double error_scale(std::span<const double> row, double size) {
  constexpr double smallest = 0x1p-80;
  double sum = 0;
  for (const double x : row) sum += x * x;
  const double rms = row.empty() ? 0 : std::sqrt(sum / row.size());
  return std::max({smallest, size, rms});
}

double logprob_tolerance() {
  return tolerance_for(DType::f32, row_roundings);
}

double logprob_scale(double logprob) {
  return std::sqrt(1 + 4 * logprob * logprob / row_roundings);
}

double entropy_scale(int64_t vocab_size) {
  return std::max(1.0, std::log(vocab_size));
}

double divergence_scale(double log_q, double log_p, bool sampled) {
  if (log_q == -HUGE_VAL) return 0;
  const double own = logprob_scale(log_q), other = logprob_scale(log_p);
  return sampled ? own + other : std::exp(log_q) * (own * (2 + std::abs(log_q - log_p)) + other);
}

double logit_gradient_tolerance(DType stored) {
  return tolerance_of(row_roundings, stored == DType::bf16 ? 1 : 0);
}

double logit_gradient_scale(double logprob, double a, double b, double weights) {
  constexpr double smallest = 0x1p-80;
  if (!std::isfinite(logprob)) return std::max(smallest, weights);
  const double size = std::abs(logprob);
  return std::max(
      smallest,
      std::exp(logprob) * (std::abs(a) + std::abs(b) * std::max(1.0, size)) * (1 + size) + weights);
}

double linear_logprob_tolerance(int64_t hidden, double logit_size) {
  return tolerance_for(DType::f32, hidden) * std::max(1.0, logit_size) + logprob_tolerance();
}

double linear_gradient_tolerance(int64_t hidden, int64_t terms, double logit_size) {
  return linear_logprob_tolerance(hidden, logit_size) + tolerance_for(DType::f32, terms);
}

DecoderShape decoder_shape(const ModelConfig& config, int64_t layers, int64_t longest_document,
                           int64_t merges) {
  return {.layers = layers,
          .hidden = config.hidden_size,
          .head_dim = config.head_dim,
          .attention_width = config.query_width(),
          .intermediate = config.intermediate_size,
          .vocab = config.vocab_size,
          .longest_document = longest_document,
          .merges = merges,
          .sinks = config.attention_sinks};
}

int64_t roundings_per_layer(const DecoderShape& shape) {
  const int64_t norms = 2 * shape.hidden;
  const int64_t projections = 2 * shape.hidden;  // to Q, K, V and to gate and up
  const int64_t merges = shape.merges + (shape.sinks ? 1 : 0);
  const int64_t attention = shape.head_dim + shape.longest_document + roundings_per_merge * merges;
  return norms + projections + attention + shape.attention_width + shape.intermediate + 1;
}

int64_t narrow_roundings_per_layer(const DecoderShape& shape) {
  if (shape.activations != DType::bf16) return 0;
  constexpr int64_t stored = 20, matrices = 7;
  const int64_t summed = 2 * (shape.tp - 1);
  return stored + summed + (shape.sinks ? 1 : 0) + (shape.residual == DType::bf16 ? 2 : 0) +
         (shape.rounded_weights ? matrices : 0);
}

namespace {

int64_t narrow_embedding_roundings(const DecoderShape& shape) {
  return shape.rounded_weights || shape.residual == DType::bf16 ? 1 : 0;
}

/// Tolerance of a value that is `wide` f32 and `narrow` bf16 roundings from the inputs.
double decoder_tolerance(int64_t wide, int64_t narrow) {
  return std::hypot(tolerance_for(DType::f32, wide),
                    narrow_safety / tolerance_safety * tolerance_for(DType::bf16, narrow));
}

}  // namespace

double hidden_tolerance(const DecoderShape& shape) {
  return decoder_tolerance(
      shape.layers * roundings_per_layer(shape),
      shape.layers * narrow_roundings_per_layer(shape) + narrow_embedding_roundings(shape));
}

double residual_sigma(const DecoderShape& shape) {
  const int64_t sums = shape.residual == DType::bf16 ? 2 * shape.layers : 0;
  return narrow_deviation * epsilon_of(DType::bf16) *
         std::sqrt(sums + narrow_embedding_roundings(shape));
}

double score_tolerance(const DecoderShape& shape, double max_abs_logit) {
  // Roundings of the final norm, the logits and the sum over the vocabulary.
  const int64_t after_layers = 2 * shape.hidden + shape.vocab;
  const int64_t narrow_after = narrow_embedding_roundings(shape) +
                               (shape.activations == DType::bf16 ? 1 : 0) +
                               (shape.rounded_weights ? 1 : 0);
  const double expected_max = std::sqrt(2 * std::log(std::max<int64_t>(2, shape.vocab)));
  const double size = std::max(1.0, std::abs(max_abs_logit) / expected_max);
  return size * decoder_tolerance(shape.layers * roundings_per_layer(shape) + after_layers,
                                  shape.layers * narrow_roundings_per_layer(shape) + narrow_after);
}

}  // namespace gyre
