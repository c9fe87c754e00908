// Tolerances of attention, measured: how much of them a plain f32 computation uses, and what they
// notice.

#include "core/tolerance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "attention/attention_reference.hpp"
#include "attention/masks/registry.hpp"
#include "attention/merge.hpp"
#include "attention/schedules/registry.hpp"
#include "attention/tolerance.hpp"
#include "core/error.hpp"
#include "core/token_random.hpp"
#include "layout_cases.hpp"
#include "report/verify.hpp"

namespace gyre {
namespace GYRE_FILE {

using Floats = std::vector<float>;

float round_to(DType type, float x) {
  return type == DType::bf16 ? to_float(to_bf16(x)) : x;
}

/// One document of normal inputs, and how it is computed.
struct Problem {
  HeadShape heads;
  MaskRule mask;
  int64_t tokens = 0;
  AttentionReductions lengths;  ///< partials, d_q_terms, hops and trips; the others follow
  ElementTypes types;
  Floats q, k, v, d_out, sinks;

  Problem(const HeadShape& heads_, const MaskRule& mask_, int64_t tokens_, int64_t parts,
          DType narrow, float score_size = 1)
      : heads(heads_), mask(mask_), tokens(tokens_) {
    heads.scale = score_size / std::sqrt(static_cast<float>(heads.head_dim));
    lengths.head_dim = lengths.value_dim = heads.head_dim;
    lengths.score_size = static_cast<double>(score_size);
    lengths.keys = mask.window > 0 ? std::min(mask.window, tokens) : tokens;
    lengths.queries = lengths.keys * heads.group();
    lengths.partials = lengths.d_q_terms = parts;
    lengths.hops = parts - 1;
    types = {narrow, narrow, narrow, narrow};
    const auto fill = [&](TokenTensor tensor, int64_t width) {
      Floats values(static_cast<size_t>(tokens * width));
      const TokenRandom random{7, tensor, narrow == DType::bf16};
      for (int64_t t = 0; t < tokens; ++t)
        fill_token_row(random, t, std::span(values).subspan(t * width, static_cast<size_t>(width)));
      return values;
    };
    q = fill(TokenTensor::q, heads.heads * heads.head_dim);
    k = fill(TokenTensor::k, heads.kv_heads * heads.head_dim);
    v = fill(TokenTensor::v, heads.kv_heads * heads.head_dim);
    d_out = fill(TokenTensor::d_out, heads.heads * heads.head_dim);
    sinks.resize(heads.heads);
    fill_token_row({7, TokenTensor::sinks}, 0, sinks);
  }

  AttentionResults reference() const {
    const std::vector<int64_t> documents = {0, tokens};
    return attention_reference(
        AttentionInputs<float>{heads, mask, documents, q, k, v, d_out, sinks});
  }
};

/// The same in f32, one key after the other and nothing clever: keys (forward, dQ) and queries (dK,
/// dV) are cut into parts, whose results are merged or added, and rounded as the types say. With
/// `left_out` >= 0 the 64 keys from there on are overlooked.
class PlainF32 {
 public:
  PlainF32(const Problem& p, int64_t left_out)
      : p_(p), heads_(p.heads.heads), dim_(p.heads.head_dim), left_out_(left_out) {
    out.resize(p.q.size());
    lse.resize(p.tokens * heads_);
    d_q.resize(p.q.size());
    d_k.resize(p.k.size());
    d_v.resize(p.k.size());
    d_sinks.resize(heads_);
    for (int64_t i = 0; i < p.tokens; ++i)
      for (int64_t h = 0; h < heads_; ++h) forward(i, h);
    delta_.resize(lse.size());
    for (size_t row = 0; row < lse.size(); ++row)
      delta_[row] = dot(&out[row * at(dim_)], &p.d_out[row * at(dim_)]);
    for (int64_t h = 0; h < heads_; ++h) sink_gradient(h);
    for (int64_t i = 0; i < p.tokens; ++i)
      for (int64_t h = 0; h < heads_; ++h) query_gradient(i, h);
    for (int64_t j = 0; j < p.tokens; ++j)
      for (int64_t g = 0; g < p.heads.kv_heads; ++g) key_gradients(j, g);
  }

  Floats out, lse, d_q, d_k, d_v;
  std::vector<double> d_sinks;

 private:
  static size_t at(int64_t i) { return static_cast<size_t>(i); }
  size_t q_row(int64_t i, int64_t h) const { return at((i * heads_ + h) * dim_); }
  size_t kv_row(int64_t j, int64_t g) const { return at((j * p_.heads.kv_heads + g) * dim_); }
  float dot(const float* a, const float* b) const {
    float sum = 0;
    for (int64_t d = 0; d < dim_; ++d) sum += a[d] * b[d];
    return sum;
  }
  float score(int64_t i, int64_t h, int64_t j) const {
    return p_.heads.scale * dot(&p_.q[q_row(i, h)], &p_.k[kv_row(j, h / p_.heads.group())]);
  }
  bool sees(int64_t i, int64_t j) const {
    if (left_out_ >= 0 && j >= left_out_ && j < left_out_ + 64) return false;
    if (p_.mask.kind == MaskKind::full) return true;
    return j <= i && (p_.mask.window == 0 || j > i - p_.mask.window);
  }
  /// Calls f(first, end) for each part of the tokens.
  template <class F>
  void for_each_part(int64_t parts, F f) const {
    for (int64_t part = 0; part < parts; ++part)
      f(part * p_.tokens / parts, (part + 1) * p_.tokens / parts);
  }

  void forward(int64_t i, int64_t h) {
    float* const o = &out[q_row(i, h)];
    float& l = lse[at(i * heads_ + h)];
    l = -std::numeric_limits<float>::infinity();
    for_each_part(p_.lengths.partials, [&](int64_t begin, int64_t end) {
      Floats values(at(dim_));
      float max = -std::numeric_limits<float>::infinity(), sum = 0;
      for (int64_t j = begin; j < end; ++j)
        if (sees(i, j)) max = std::max(max, score(i, h, j));
      for (int64_t j = begin; j < end; ++j) {
        if (!sees(i, j)) continue;
        const float w = std::exp(score(i, h, j) - max);
        sum += w;
        const float* const v = &p_.v[kv_row(j, h / p_.heads.group())];
        for (int64_t d = 0; d < dim_; ++d) values[at(d)] += w * v[d];
      }
      if (sum == 0) return;
      const MergeWeights<float> w = merge_lse(l, max + std::log(sum));
      for (int64_t d = 0; d < dim_; ++d)
        o[d] = round_to(p_.types.partial_out, w.w1 * o[d] + w.w2 * (values[at(d)] / sum));
      l = w.lse;
    });
    const MergeWeights<float> w = merge_lse(l, p_.sinks[at(h)]);
    for (int64_t d = 0; d < dim_; ++d) o[d] = round_to(p_.types.partial_out, w.w1 * o[d]);
    l = w.lse;
  }
  float delta(int64_t i, int64_t h) const { return delta_[at(i * heads_ + h)]; }
  void sink_gradient(int64_t h) {
    for (int64_t i = 0; i < p_.tokens; ++i)
      d_sinks[at(h)] -=
          static_cast<double>(std::exp(p_.sinks[at(h)] - lse[at(i * heads_ + h)]) * delta(i, h));
  }
  float p(int64_t i, int64_t h, int64_t j) const {
    return std::exp(score(i, h, j) - lse[at(i * heads_ + h)]);
  }
  float ds(int64_t i, int64_t h, int64_t j) const {
    const float dp = dot(&p_.d_out[q_row(i, h)], &p_.v[kv_row(j, h / p_.heads.group())]);
    return p_.heads.scale * p(i, h, j) * (dp - delta(i, h));
  }
  void query_gradient(int64_t i, int64_t h) {
    float* const sum = &d_q[q_row(i, h)];
    for_each_part(p_.lengths.d_q_terms, [&](int64_t begin, int64_t end) {
      Floats term(at(dim_));
      bool any = false;
      for (int64_t j = begin; j < end; ++j) {
        if (!sees(i, j)) continue;
        any = true;
        const float x = ds(i, h, j);
        const float* const k = &p_.k[kv_row(j, h / p_.heads.group())];
        for (int64_t d = 0; d < dim_; ++d) term[at(d)] += x * k[d];
      }
      for (int64_t d = 0; any && d < dim_; ++d)
        sum[d] = round_to(p_.types.d_q, sum[d] + term[at(d)]);
    });
  }
  /// Sums travel from part to part of the queries.
  void key_gradients(int64_t j, int64_t g) {
    float *const k_sum = &d_k[kv_row(j, g)], *const v_sum = &d_v[kv_row(j, g)];
    for_each_part(p_.lengths.hops + 1, [&](int64_t begin, int64_t end) {
      Floats k_term(at(dim_)), v_term(at(dim_));
      for (int64_t i = begin; i < end; ++i)
        for (int64_t h = g * p_.heads.group(); h < (g + 1) * p_.heads.group(); ++h) {
          if (!sees(i, j)) continue;
          const float x = ds(i, h, j), w = p(i, h, j);
          for (int64_t d = 0; d < dim_; ++d) {
            k_term[at(d)] += x * p_.q[q_row(i, h) + at(d)];
            v_term[at(d)] += w * p_.d_out[q_row(i, h) + at(d)];
          }
        }
      for (int64_t d = 0; d < dim_; ++d) {
        k_sum[d] = k_term[at(d)] + round_to(p_.types.wire_d_kv, k_sum[d]);
        v_sum[d] = v_term[at(d)] + round_to(p_.types.wire_d_kv, v_sum[d]);
      }
    });
  }

  const Problem& p_;
  int64_t heads_, dim_, left_out_;
  Floats delta_;
};

/// Shares of the tolerances that the worst values use.
using Used = std::array<double, 6>;
constexpr std::array names = {"out", "lse", "d_q", "d_k", "d_v", "d_sinks"};

double worst_row(const Floats& got, const std::vector<double>& want,
                 const std::vector<double>& sizes) {
  const size_t dim = got.size() / sizes.size();
  double worst = 0;
  for (size_t row = 0; row < sizes.size(); ++row) {
    const double scale = error_scale(std::span(want).subspan(row * dim, dim), sizes[row]);
    for (size_t i = row * dim; i < (row + 1) * dim; ++i)
      worst = std::max(worst, error_between(static_cast<double>(got[i]), want[i], scale));
  }
  return worst;
}

Used used(const Problem& p, const AttentionResults& want, int64_t left_out = -1) {
  const PlainF32 got(p, left_out);
  const AttentionTolerances t = attention_tolerances(p.lengths, p.types);
  Used shares{};
  shares[0] = worst_row(got.out, want.out, want.out_size) / t.out;
  for (size_t i = 0; i < want.lse.size(); ++i)
    shares[1] =
        std::max(shares[1], error_between(static_cast<double>(got.lse[i]), want.lse[i]) / t.lse);
  shares[2] = worst_row(got.d_q, want.d_q, want.d_q_size) / t.d_q;
  shares[3] = worst_row(got.d_k, want.d_k, want.d_k_size) / t.d_k;
  shares[4] = worst_row(got.d_v, want.d_v, want.d_v_size) / t.d_v;
  for (size_t h = 0; h < want.d_sinks.size(); ++h) {
    const double scale = error_scale(std::span(want.d_sinks).subspan(h, 1), want.d_sinks_size[h]);
    shares[5] =
        std::max(shares[5], error_between(got.d_sinks[h], want.d_sinks[h], scale) / t.d_sinks);
  }
  return shares;
}

/// The larger of each share.
void raise(Used& most, const Used& shares) {
  for (size_t i = 0; i < most.size(); ++i) most.at(i) = std::max(most.at(i), shares.at(i));
}

/// The worst of all shares must be within the tolerance, and not far within it. Gradients of sinks
/// are few values instead of thousands, and use less.
void expect_well_used(const Used& most) {
  for (size_t i = 0; i < most.size(); ++i) {
    EXPECT_LT(most.at(i), 0.8) << names.at(i);
    EXPECT_GT(most.at(i), i == 5 ? 0.005 : 0.05) << names.at(i);
  }
}

TEST(AttentionTolerance, PlainF32UsesATenthToAHalfOfIt) {
  for (const DType type : {DType::f32, DType::bf16}) {
    SCOPED_TRACE(name_of(type));
    Used most{};
    for (const int64_t parts : {1, 8})
      for (const int64_t dim : {32, 128}) {
        for (const int64_t tokens : {1, 2, 17, 200}) {
          const Problem p({2, 1, dim, 0}, MaskKind::causal, tokens, parts, type);
          raise(most, used(p, p.reference()));
        }
        const Problem p({2, 1, dim, 0}, {MaskKind::causal, 16}, 200, parts, type);
        raise(most, used(p, p.reference()));
      }
    expect_well_used(most);
  }
}

TEST(AttentionTolerance, LargeScoresAreAccountedFor) {
  for (const float size : {4.0F, 64.0F}) {  // 64: one key has nearly all the weight, others none
    SCOPED_TRACE(size);
    Used most{};
    for (const int64_t parts : {1, 8}) {
      const Problem p({2, 1, 64, 0}, MaskKind::causal, 200, parts, DType::f32, size);
      raise(most, used(p, p.reference()));
    }
    for (size_t i = 0; i < most.size(); ++i) EXPECT_LT(most.at(i), 0.8) << names.at(i);
  }
}

TEST(AttentionTolerance, NoticesABlockOfKeysThatIsLeftOut) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const int64_t parts : {1, 8}) {
      SCOPED_TRACE(name_of(type));
      const Problem p({2, 1, 64, 0}, MaskKind::causal, 300, parts, type);
      const Used shares = used(p, p.reference(), 64);
      // The gradient of a sink is one sum over all rows, of which bf16 hides such a share.
      for (size_t i = 0; i < (type == DType::f32 ? 6U : 5U); ++i)
        EXPECT_GT(shares.at(i), 10) << names.at(i);
    }
}

TEST(AttentionTolerance, CountsTheRoundingsOfEveryReduction) {
  AttentionReductions n;
  n.head_dim = n.value_dim = 64;
  n.keys = n.queries = 1;
  const AttentionTolerances one = attention_tolerances(n, {});
  const auto f32 = [](int64_t roundings) { return tolerance_for(DType::f32, roundings); };
  EXPECT_DOUBLE_EQ(one.out, f32(64 + 1 + 4 + 1));
  EXPECT_DOUBLE_EQ(one.lse, f32(70));
  EXPECT_DOUBLE_EQ(one.d_q, f32(70 + 3 + 70 + 128 + 1));
  EXPECT_DOUBLE_EQ(one.d_k, f32(70 + 3 + 70 + 128 + 1));
  EXPECT_DOUBLE_EQ(one.d_v, f32(70 + 3 + 1));
  EXPECT_DOUBLE_EQ(one.d_sinks, f32(70 + 3 + 70 + 64));
  n.queries = 6;
  n.hops = 4;
  const AttentionTolerances many = attention_tolerances(n, {});
  EXPECT_DOUBLE_EQ(many.d_k, f32(70 + 3 + 70 + 128 + 10));
  EXPECT_DOUBLE_EQ(many.d_v, f32(70 + 3 + 10));
  EXPECT_EQ(many.d_q, one.d_q);

  // Scores of size 2: their errors are twice as large; the largest of 100 is 2 sqrt(2 ln 100).
  AttentionReductions large = n;
  large.score_size = 2;
  large.keys = 100;
  const double squares = 4 * 2 * std::log(100.0);
  const auto roundings = [](double tolerance) {
    return std::pow(tolerance / tolerance_for(DType::f32, 1), 2);
  };
  EXPECT_NEAR(roundings(attention_tolerances(large, {}).out), 64 * 4 + 100 + 4 + 3 * squares + 1,
              1e-6);
  EXPECT_NEAR(roundings(attention_tolerances(large, {}).d_v),
              64 * 4 + 100 + 4 + 3 * squares + 1 + 3 * squares + 10, 1e-6);

  // In bf16, of which some is rounded so: more than the f32 part, in squares.
  n.partials = 3;
  n.d_q_terms = 5;
  const AttentionTolerances wide = attention_tolerances(n, {});
  KernelPrecision kernel;
  const auto narrow = [&](const ElementTypes& types, double AttentionTolerances::*tensor) {
    const double all = attention_tolerances(n, types, kernel).*tensor, rest = wide.*tensor;
    const double one_rounding = tolerance_for(DType::bf16, 1);
    return std::round((all * all - rest * rest) / (one_rounding * one_rounding) * 1e6) / 1e6;
  };
  const auto all_of = [&](const ElementTypes& types) {
    std::vector<double> counts;
    for (const auto tensor :
         {&AttentionTolerances::out, &AttentionTolerances::lse, &AttentionTolerances::d_q,
          &AttentionTolerances::d_k, &AttentionTolerances::d_v, &AttentionTolerances::d_sinks})
      counts.push_back(narrow(types, tensor));
    return counts;
  };
  using Counts = std::vector<double>;
  ElementTypes types;
  types.partial_out = DType::bf16;
  EXPECT_EQ(all_of(types), (Counts{3, 0, 3, 3, 0, 3}));
  types = {};
  types.d_q = DType::bf16;
  EXPECT_EQ(all_of(types), (Counts{0, 0, 5, 0, 0, 0}));
  types = {};
  types.wire_d_kv = DType::bf16;
  EXPECT_EQ(all_of(types), (Counts{0, 0, 0, 4, 4, 0}));
  types = {};
  types.activations = DType::bf16;
  EXPECT_EQ(all_of(types), (Counts{0, 0, 0, 0, 0, 0}));
  n.out_trips = 1;
  n.d_q_trips = 2;
  EXPECT_EQ(all_of(types), (Counts{1, 0, 2, 0, 0, 0}));
  types = {};
  kernel.narrow_weights = true;
  EXPECT_EQ(all_of(types), (Counts{1, 0, 2, 2, 1, 1}));
  kernel = {false, true};
  EXPECT_EQ(all_of(types), (Counts{3, 0, 8, 8, 5, 3}));
}

TEST(AttentionTolerance, ReductionsAreCountedFromThePlan) {
  LayoutOptions options;
  options.cp = 4;
  const Layout layout = contiguous(test::full_bounds({64, 96}).view(), options);
  const auto reductions = [&](const std::string& schedule, const MaskRule& mask) {
    const AttentionProblem problem{&layout, {8, 4, 16, 0.25F, 24}, mask, {}};
    return attention_reductions(plan_rank(find_schedule(schedule), problem, 3), problem);
  };
  const AttentionReductions ring = reductions("ring", MaskKind::full);
  EXPECT_EQ(ring.head_dim, 16);
  EXPECT_EQ(ring.value_dim, 24);
  EXPECT_EQ(ring.keys, 96);
  EXPECT_EQ(ring.queries, 2 * 96);
  EXPECT_EQ(ring.partials, 3);  // rank 0 has nothing of the document on rank 3
  EXPECT_EQ(ring.d_q_terms, 3);
  EXPECT_EQ(ring.hops, 3);
  EXPECT_EQ(ring.out_trips, 0);
  EXPECT_EQ(ring.d_q_trips, 0);
  EXPECT_EQ(reductions("ring-forward", MaskKind::full).hops, 4);
  const AttentionReductions window = reductions("ring", {MaskKind::causal, 10});
  EXPECT_EQ(window.keys, 10);
  EXPECT_EQ(window.queries, 20);
  EXPECT_EQ(window.partials, 2);
  // A prompt of 10, which 86 tokens of answers of 5 see.
  const AttentionReductions prompt = reductions(
      "ring", parse_mask("shared-prefix,prompt=10,answer=5").of(std::vector<int64_t>{64, 96}));
  EXPECT_EQ(prompt.keys, 15);
  EXPECT_EQ(prompt.queries, 2 * 96);
  // A merge at the end adds to the partials of its own heads, also where 2 query heads have 1 of KV.
  AttentionProblem at_end{&layout, {8, 4, 16, 0.25F}, MaskKind::full, {}};
  at_end.options.merge = 1;
  RankPlan late = plan_rank(find_schedule("ring"), at_end, 3);
  EXPECT_EQ(attention_reductions(late, at_end).partials, 3 + 1);
  for (PlanArray& array : late.arrays)
    array.heads = array.kind == ArrayKind::kv ? HeadRange{2, 2} : HeadRange{4, 4};
  for (Step& step : late.forward)
    if (auto* compute = std::get_if<step::Compute>(&step)) compute->kv_heads = {2, 2};
  EXPECT_EQ(attention_reductions(late, at_end).partials, 3 + 1);
  const AttentionReductions heads = reductions("all-to-all", MaskKind::full);
  EXPECT_EQ(heads.partials, 1);
  EXPECT_EQ(heads.hops, 1);  // each KV head is on one rank
  EXPECT_EQ(heads.out_trips, 1);
  EXPECT_EQ(heads.d_q_trips, 1);
  // The most of all ranks: a causal rank 0 has one partial, rank 3 three.
  const AttentionProblem causal{&layout, {8, 4, 16, 0.25F}, MaskKind::causal, {}};
  const Plan all = plan_all(find_schedule("ring"), causal);
  EXPECT_EQ(attention_reductions(all.ranks[0], causal).partials, 1);
  EXPECT_EQ(attention_reductions(all.ranks[3], causal).partials, 3);
  EXPECT_EQ(attention_reductions(all, causal).partials, 3);
  EXPECT_EQ(attention_reductions(all, causal).hops, 3);
  options.cp = 1;
  const Layout alone = contiguous(test::full_bounds({5}).view(), options);
  const AttentionProblem problem{&alone, {8, 4, 16, 0.25F}, MaskKind::full, {}};
  const RankPlan plan = plan_rank(find_schedule("ring"), problem, 0);
  const AttentionReductions agreed = attention_reductions(plan, problem, test::world());
  EXPECT_EQ(agreed.keys, 5);
  EXPECT_EQ(agreed.partials, 1);
  EXPECT_EQ(agreed.hops, 0);
}

TEST(ErrorScale, IsTheRmsOrTheSizeAndNeverNothing) {
  const std::vector<double> row = {3, -4, 0, 0};
  EXPECT_DOUBLE_EQ(error_scale(row, 1), 2.5);
  EXPECT_DOUBLE_EQ(error_scale(row, 7), 7);
  EXPECT_DOUBLE_EQ(error_scale({}, 0), 0x1p-80);
}

}  // namespace GYRE_FILE
}  // namespace gyre
