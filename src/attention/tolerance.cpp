#include "attention/tolerance.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

namespace gyre {

double attention_tolerance(int64_t head_dim, int64_t keys, int64_t merges) {
  return tolerance_for(DType::f32, head_dim + keys + roundings_per_merge * merges + 1);
}

namespace {

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
  int64_t group;  ///< query heads of a KV head
  MostPerHeads partials = {}, d_q_terms = {}, hops = {}, out_trips = {}, d_q_trips = {};
  std::set<int> merged = {};  ///< arrays of partial results
  int64_t partial_trips = 0;

  explicit StepCounter(const RankPlan& plan, int64_t group_) : group(group_) {
    for (const Step& any : plan.forward)
      if (const auto* merge = std::get_if<step::Merge>(&any))
        for (const step::Merge::Partial& partial : merge->partials) merged.insert(partial.out);
  }
  void add(const RankPlan& plan, const Step& any) {
    if (const auto* compute = std::get_if<step::Compute>(&any)) {
      if (compute->out >= 0) partials.add(compute->kv_heads);
      if (compute->d_q >= 0) d_q_terms.add(compute->kv_heads);
    }
    // A merge of n partials rounds n results. The n partials were rounded before: their errors are
    // independent, and their weights add up to 1, so that together they count as one result more.
    if (const auto* merge = std::get_if<step::Merge>(&any)) {
      HeadRange heads = plan.arrays[merge->out].heads;  // query heads; partials counts KV heads
      heads.begin /= group;
      partials.add(heads);
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
        if (kind == ArrayKind::out && merged.contains(slice.array)) partial_trips = 1;
        if (kind == ArrayKind::out && !merged.contains(slice.array)) out_trips.add({m.peer, 0});
        if (kind == ArrayKind::d_q) d_q_trips.add({m.peer, 0});
      }
    }
  }
};

/// The counts that may differ between ranks.
constexpr std::array counts_of_ranks = {
    &AttentionReductions::partials,  &AttentionReductions::d_q_terms,
    &AttentionReductions::hops,      &AttentionReductions::partial_trips,
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
  StepCounter counter(plan, problem.heads.group());
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const Step& step : plan.steps(pass)) counter.add(plan, step);
  lengths.partials = std::max<int64_t>(1, counter.partials.most());
  lengths.d_q_terms = std::max<int64_t>(1, counter.d_q_terms.most());
  lengths.hops = counter.hops.most();
  lengths.partial_trips = counter.partial_trips;
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
  const int64_t narrow_out = narrow(types.partial_out, lengths.partials) +
                             narrow(types.activations, lengths.partial_trips) +
                             inside(lengths.partials);
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
  return from_roundings(lengths, types, kernel, mixed_tolerance);
}

AttentionTolerances attention_sigmas(const AttentionReductions& lengths, const ElementTypes& types,
                                     const KernelPrecision& kernel) {
  const double rounding = narrow_deviation * epsilon_of(DType::bf16);
  return from_roundings(lengths, types, kernel, [&](double wide, int64_t narrow) {
    if (narrow == 0) return 0.0;
    return std::hypot(mixed_tolerance(wide, 0) / tolerance_safety, rounding * std::sqrt(narrow));
  });
}

}  // namespace gyre
