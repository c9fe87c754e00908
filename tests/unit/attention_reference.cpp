// The reference of attention: against finite differences, hand-made cases and itself by sampling.

#include "attention/attention_reference.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "core/token_random.hpp"
#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

using Values = std::vector<double>;

/// Tensors of a problem, in double so that finite differences may move them.
struct Problem {
  HeadShape heads;
  MaskRule mask;
  std::vector<int64_t> documents;
  Values q, k, v, d_out, sinks;

  AttentionInputs<double> inputs() const { return {heads, mask, documents, q, k, v, d_out, sinks}; }
  AttentionResults run() const { return attention_reference(inputs()); }
};

Values random_values(uint64_t seed, TokenTensor tensor, int64_t count) {
  std::vector<float> row(count);
  fill_token_row({seed, tensor}, 0, row);
  return {row.begin(), row.end()};
}

Problem make_problem(const HeadShape& heads, const MaskRule& mask,
                     const std::vector<int64_t>& documents, bool sinks, uint64_t seed = 1) {
  Problem p{heads, mask, documents, {}, {}, {}, {}, {}};
  const int64_t tokens = documents.back();
  p.q = random_values(seed, TokenTensor::q, tokens * heads.heads * heads.head_dim);
  p.k = random_values(seed, TokenTensor::k, tokens * heads.kv_heads * heads.head_dim);
  p.v = random_values(seed, TokenTensor::v, tokens * heads.kv_heads * heads.value_dim());
  p.d_out = random_values(seed, TokenTensor::d_out, tokens * heads.heads * heads.value_dim());
  if (sinks) p.sinks = random_values(seed, TokenTensor::sinks, heads.heads);
  return p;
}

/// What the gradients are gradients of.
double loss(const Problem& p) {
  const Values out = p.run().out;
  return std::inner_product(out.begin(), out.end(), p.d_out.begin(), 0.0);
}

/// Compares a gradient with central differences. Their error is of third order, some 1e-10 for
/// steps of 1e-5, plus what 1e-16 divided by the step makes, 1e-11.
void expect_gradient(Problem p, Values Problem::*input, const Values& gradient) {
  constexpr double move = 1e-5, tolerance = 1e-8;
  ASSERT_EQ((p.*input).size(), gradient.size());
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double value = (p.*input)[i];
    (p.*input)[i] = value + move;
    const double above = loss(p);
    (p.*input)[i] = value - move;
    const double below = loss(p);
    (p.*input)[i] = value;
    EXPECT_NEAR((above - below) / (2 * move), gradient[i], tolerance) << "element " << i;
  }
}

const std::vector<MaskRule> masks = {MaskKind::causal, MaskKind::full, {MaskKind::causal, 2}};

TEST(AttentionReference, GradientsAreThoseOfFiniteDifferences) {
  for (const MaskRule& mask : masks)
    for (const bool sinks : {false, true}) {
      const Problem p = make_problem({4, 2, 3, 0.7F, sinks ? 5 : 0}, mask, {0, 3, 3, 4, 8}, sinks);
      const AttentionResults r = p.run();
      expect_gradient(p, &Problem::q, r.d_q);
      expect_gradient(p, &Problem::k, r.d_k);
      expect_gradient(p, &Problem::v, r.d_v);
      expect_gradient(p, &Problem::sinks, r.d_sinks);
    }
}

TEST(AttentionReference, TwoTokensByHand) {
  // Scores of the second query: log 1 and log 3, weights 1/4 and 3/4.
  Problem p{{1, 1, 1, 0.5F},    MaskKind::causal, {0, 2}, {5, 2},
            {0, std::log(3.0)}, {8, 4},           {1, 1}, {}};
  const AttentionResults r = p.run();
  EXPECT_NEAR(r.out[0], 8, 1e-14);
  EXPECT_NEAR(r.out[1], 5, 1e-14);
  EXPECT_NEAR(r.lse[0], 0, 1e-14);
  EXPECT_NEAR(r.lse[1], std::log(4.0), 1e-14);
  EXPECT_NEAR(r.delta[1], 5, 1e-14);
  EXPECT_NEAR(r.d_q[0], 0, 1e-14);
  EXPECT_NEAR(r.d_q[1], 0.5 * 0.75 * (4 - 5) * std::log(3.0), 1e-14);
  EXPECT_NEAR(r.d_v[0], 1.25, 1e-14);
  EXPECT_NEAR(r.d_v[1], 0.75, 1e-14);
  EXPECT_NEAR(r.d_k[0], 0.5 * 0.25 * (8 - 5) * 2, 1e-14);
  // A sink as heavy as both keys together halves the output.
  p.sinks = {std::log(4.0)};
  const AttentionResults with_sink = p.run();
  EXPECT_NEAR(with_sink.out[1], 2.5, 1e-14);
  EXPECT_NEAR(with_sink.lse[1], std::log(8.0), 1e-14);
  EXPECT_NEAR(with_sink.d_sinks[0], -(0.8 * 1.6 + 0.5 * 2.5), 1e-14);
}

TEST(AttentionReference, AWindowCountsTheQueryItself) {
  // Without queries all visible keys weigh the same, and log-sum-exps count them.
  for (const int64_t window : {0, 1, 2, 3, 100}) {
    Problem p = make_problem({1, 1, 4, 0.5F}, {MaskKind::causal, window}, {0, 2, 7}, false);
    std::fill(p.q.begin(), p.q.end(), 0);
    const AttentionResults r = p.run();
    for (int64_t token = 0; token < 7; ++token) {
      const int64_t position = token < 2 ? token : token - 2;
      const int64_t seen = window == 0 ? position + 1 : std::min(position + 1, window);
      EXPECT_NEAR(r.lse[token], std::log(static_cast<double>(seen)), 1e-14);
    }
    for (size_t i = 0; window == 1 && i < p.v.size(); ++i) EXPECT_NEAR(r.out[i], p.v[i], 1e-15);
  }
}

TEST(AttentionReference, SizesAreThoseOfTheTermsBeforeTheyCancel) {
  // One token sees itself only: out is v, and its gradients by q and k vanish whatever their terms.
  const Problem p = make_problem({1, 1, 4, 0.5F, 9}, MaskKind::causal, {0, 1}, false);
  const AttentionResults r = p.run();
  const auto length = [](const Values& x) {
    return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
  };
  EXPECT_NEAR(r.out_size[0], length(p.v) / 3, 1e-14);
  EXPECT_NEAR(r.d_v_size[0], length(p.d_out) / 3, 1e-14);
  EXPECT_NEAR(r.d_q_size[0], 0.5 * length(p.d_out) * length(p.v) * length(p.k) / 6, 1e-14);
  EXPECT_NEAR(r.d_k_size[0], 0.5 * length(p.d_out) * length(p.v) * length(p.q) / 6, 1e-14);
  EXPECT_LT(length(r.d_q) + length(r.d_k), 1e-15);
}

TEST(AttentionReference, SizesAreAboutTheRmsOfRowsOfRandomInput) {
  const Problem p = make_problem({2, 1, 64, 0.125F}, MaskKind::causal, {0, 256}, true);
  const AttentionResults r = p.run();
  const auto ratio = [](const Values& rows, const Values& sizes, size_t row) {
    double sum = 0;
    for (size_t d = 0; d < 64; ++d) sum += rows[row * 64 + d] * rows[row * 64 + d];
    return std::sqrt(sum / 64) / sizes[row];
  };
  for (const size_t token : {100U, 200U, 255U}) {
    EXPECT_NEAR(ratio(r.out, r.out_size, 2 * token), 1, 0.4);
    EXPECT_NEAR(ratio(r.d_q, r.d_q_size, 2 * token), 1, 0.4);
  }
  for (const size_t token : {0U, 100U, 200U}) {
    EXPECT_NEAR(ratio(r.d_k, r.d_k_size, token), 1, 0.4);
    EXPECT_NEAR(ratio(r.d_v, r.d_v_size, token), 1, 0.4);
  }
  for (size_t head = 0; head < 2; ++head)
    EXPECT_LT(std::abs(r.d_sinks[head]), 4 * r.d_sinks_size[head]);
}

TEST(AttentionReference, SharedKvHeadsAreAsRepeatedOnes) {
  const Problem shared = make_problem({6, 2, 3, 0.7F}, MaskKind::causal, {0, 5}, true);
  Problem repeated = shared;
  repeated.heads.kv_heads = 6;
  const auto repeat = [](const Values& from) {
    Values to;
    for (size_t token = 0; token < 5; ++token)
      for (size_t head = 0; head < 6; ++head)
        for (size_t d = 0; d < 3; ++d) to.push_back(from[(token * 2 + head / 3) * 3 + d]);
    return to;
  };
  repeated.k = repeat(shared.k);
  repeated.v = repeat(shared.v);
  const AttentionResults a = shared.run(), b = repeated.run();
  EXPECT_EQ(a.out, b.out);
  EXPECT_EQ(a.d_q, b.d_q);
  for (size_t i = 0; i < a.d_k.size(); ++i) {
    const size_t token = i / 6, head = i / 3 % 2, d = i % 3;
    const auto sum_of_group = [&](const Values& x) {
      double sum = 0;
      for (size_t g = 0; g < 3; ++g) sum += x[(token * 6 + head * 3 + g) * 3 + d];
      return sum;
    };
    EXPECT_NEAR(a.d_k[i], sum_of_group(b.d_k), 1e-14);
    EXPECT_NEAR(a.d_v[i], sum_of_group(b.d_v), 1e-14);
  }
}

TEST(AttentionReference, DocumentsDoNotSeeEachOther) {
  Problem p = make_problem({2, 2, 4, 0.5F}, MaskKind::full, {0, 3, 7}, false);
  const Values before = p.run().out;
  for (size_t i = 0; i < 3 * 8; ++i) p.k[i] = p.v[i] = 100;
  const Values after = p.run().out;
  for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(before[i] == after[i], i >= 3 * 8);
}

TEST(AttentionReference, WithoutGradientsThereAreNone) {
  Problem p = make_problem({2, 1, 4, 0.5F}, MaskKind::causal, {0, 3}, true);
  const Values out = p.run().out;
  p.d_out.clear();
  const AttentionResults r = p.run();
  EXPECT_EQ(r.out, out);
  for (const Values* x : {&r.delta, &r.d_q, &r.d_k, &r.d_v, &r.d_sinks, &r.d_k_size})
    EXPECT_TRUE(x->empty());
}

/// Rows [first row + token] of an f32 copy of a tensor, through a scratch row that the next call
/// overwrites.
AttentionRows::Row row_accessor(const Values& tensor, int64_t width) {
  auto scratch = std::make_shared<std::vector<float>>(static_cast<size_t>(width));
  return [&tensor, width, scratch](int64_t token) {
    for (int64_t i = 0; i < width; ++i)
      (*scratch)[i] = static_cast<float>(tensor[token * width + i]);
    return scratch->data();
  };
}

/// The part [row · width, (row + 1) · width) equals row `place` of the sample, but for rounding in
/// double: some 1e-16, times the length of sums of terms of about 1.
void expect_row(const Values& sample, size_t place, const Values& full, int64_t row, size_t width) {
  for (size_t i = 0; i < width; ++i)
    RC_ASSERT(std::abs(sample[place * width + i] - full[static_cast<size_t>(row) * width + i]) <=
              1e-13);
}

TEST(AttentionReference, SampledRowsEqualThoseOfTheWhole) {
  EXPECT_TRUE(rc::check("queries and keys of a document, any order, some of them twice", [] {
    const HeadShape heads{4, *rc::gen::element<int64_t>(1, 2, 4), 5, 0.6F,
                          *rc::gen::element<int64_t>(0, 3, 7)};
    const MaskRule mask = *rc::gen::elementOf(masks);
    const Problem p = make_problem(heads, mask, {0, 3, 20, 30}, *rc::gen::arbitrary<bool>(),
                                   *rc::gen::arbitrary<uint64_t>());
    const AttentionResults full = p.run();
    const std::vector<float> sinks(p.sinks.begin(), p.sinks.end());
    const int64_t q_width = heads.heads * heads.head_dim;
    const int64_t k_width = heads.kv_heads * heads.head_dim;
    const int64_t out_width = heads.heads * heads.value_dim();
    const int64_t v_width = heads.kv_heads * heads.value_dim();
    const AttentionRows rows{heads,
                             mask,
                             row_accessor(p.q, q_width),
                             row_accessor(p.k, k_width),
                             row_accessor(p.v, v_width),
                             row_accessor(p.d_out, out_width),
                             sinks};
    const DocumentRange document{3, 20};
    const auto tokens = *rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(3, 20));
    const QueryResults queries = reference_queries(rows, document, tokens);
    const auto part = [&](const Values& x) {
      return Values(x.begin() + 3 * heads.heads, x.begin() + 20 * heads.heads);
    };
    const KeyResults keys =
        reference_keys(rows, document, tokens, part(full.lse), part(full.delta));
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto h = static_cast<size_t>(heads.heads), g = static_cast<size_t>(heads.kv_heads);
      expect_row(queries.out, i, full.out, tokens[i], out_width);
      expect_row(queries.lse, i, full.lse, tokens[i], h);
      expect_row(queries.delta, i, full.delta, tokens[i], h);
      expect_row(queries.d_q, i, full.d_q, tokens[i], q_width);
      expect_row(queries.out_size, i, full.out_size, tokens[i], h);
      expect_row(queries.d_q_size, i, full.d_q_size, tokens[i], h);
      expect_row(keys.d_k, i, full.d_k, tokens[i], k_width);
      expect_row(keys.d_v, i, full.d_v, tokens[i], v_width);
      expect_row(keys.d_k_size, i, full.d_k_size, tokens[i], g);
      expect_row(keys.d_v_size, i, full.d_v_size, tokens[i], g);
    }
  }));
}

TEST(AttentionReference, RefusesWhatItCannotDo) {
  const Problem good = make_problem({2, 1, 4, 0.5F}, MaskKind::causal, {0, 3}, true);
  const auto refuse = [&](const std::string& message, const std::function<void(Problem&)>& spoil) {
    Problem p = good;
    spoil(p);
    test::expect_usage(message, [&] { p.run(); });
  };
  refuse("3 query heads for 2 KV heads; wanted: a multiple of the KV heads", [](Problem& p) {
    p.heads = {3, 2, 4, 1};
  });
  refuse("head_dim 0; wanted: 1 or more", [](Problem& p) { p.heads.head_dim = 0; });
  refuse("v_head_dim -1; wanted: 1 or more", [](Problem& p) { p.heads.v_head_dim = -1; });
  refuse("a window of 2 with a full mask; wanted: 0, or a causal mask", [](Problem& p) {
    p.mask = {MaskKind::full, 2};
  });
  refuse("document boundaries begin with nothing, not 0", [](Problem& p) { p.documents = {}; });
  refuse("document boundaries begin with 1, not 0", [](Problem& p) { p.documents = {1, 3}; });
  refuse("document 1 ends at token 1, before its begin at 2", [](Problem& p) {
    p.documents = {0, 2, 1};
  });
  refuse("q has 23 elements, not 24", [](Problem& p) { p.q.pop_back(); });
  refuse("k has 11 elements, not 12", [](Problem& p) { p.k.pop_back(); });
  refuse("v has 13 elements, not 12", [](Problem& p) { p.v.push_back(0); });
  refuse("d_out has 1 elements, not 24", [](Problem& p) { p.d_out = {1}; });
  refuse("sinks has 3 elements, not 2", [](Problem& p) { p.sinks.push_back(0); });

  const AttentionRows rows{good.heads,
                           good.mask,
                           row_accessor(good.q, 8),
                           row_accessor(good.k, 4),
                           row_accessor(good.v, 4),
                           nullptr,
                           {}};
  const std::vector<int64_t> outside = {3};
  test::expect_usage("token 3 is not in the document of tokens [0, 3)", [&] {
    reference_queries(rows, {0, 3}, outside);
  });
  test::expect_usage("gradients of keys need d_out", [&] {
    reference_keys(rows, {0, 3}, {}, {}, {});
  });
}

}  // namespace GYRE_FILE
}  // namespace gyre
