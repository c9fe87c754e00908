// The rows that gyre-logprobs makes up, and those that it takes from files.

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "apps/logprobs/inputs.hpp"
#include "apps/logprobs/operation.hpp"
#include "errors.hpp"
#include "logprobs/reference.hpp"

namespace gyre {
namespace GYRE_FILE {

LogprobsOptions options_of(int64_t vocab, int ranks = 1) {
  LogprobsOptions o;
  o.vocab = vocab;
  o.tp = ranks;
  check_options(o, ranks);
  return o;
}

std::vector<float> whole(const LogprobsInputs& inputs, int64_t token, int64_t columns,
                         TokenTensor tensor = TokenTensor::logits) {
  std::vector<float> row(columns);
  inputs.row(tensor, token, 0, row);
  return row;
}

TEST(LogprobsInputs, AnyPartOfARowIsThatOfTheWhole) {
  EXPECT_TRUE(rc::check([](uint8_t at, uint8_t length, bool rounds) {
    LogprobsOptions o = options_of(300);
    o.dtype = rounds ? "bf16" : "f32";
    const LogprobsWorkload problem = generated_workload(o, 10);
    const auto inputs = random_inputs(problem, o);
    for (const TokenTensor tensor : {TokenTensor::logits, TokenTensor::teacher}) {
      const std::vector<float> row = whole(*inputs, 7, 520, tensor);
      std::vector<float> part(length);
      inputs->row(tensor, 7, at, part);
      for (size_t i = 0; i < part.size(); ++i) {
        const float want = row[at + i];
        RC_ASSERT((part[i] == want || (std::isnan(part[i]) && std::isnan(want))));
      }
      RC_ASSERT(std::all_of(row.begin() + 300, row.end(), [](float z) { return std::isnan(z); }));
      RC_ASSERT(
          std::none_of(row.begin(), row.begin() + 300, [](float z) { return std::isnan(z); }));
    }
  }));
}

TEST(LogprobsInputs, AreExactInTheirType) {
  LogprobsOptions o = options_of(500);
  o.dtype = "bf16";
  const auto inputs = random_inputs(generated_workload(o, 4), o);
  for (const float z : whole(*inputs, 3, 500)) EXPECT_EQ(to_float(to_bf16(z)), z);
}

// A model's rows have a nucleus: with the defaults, top-p 0.9 keeps some tens of columns.
TEST(LogprobsInputs, PeaksMakeANucleus) {
  const LogprobsOptions o = options_of(32768);
  const auto inputs = random_inputs(generated_workload(o, 100), o);
  for (const int64_t token : {0, 41, 99}) {
    const std::vector<float> row = whole(*inputs, token, o.vocab);
    const std::vector<double> logits(row.begin(), row.end());
    const std::vector<bool> kept = filter_reference(logits, {0, 0.9, 1});
    const auto count = std::count(kept.begin(), kept.end(), true);
    EXPECT_GE(count, 8) << token;
    EXPECT_LE(count, 32) << token;
    EXPECT_GT(score_row_reference(logits, 0).entropy, 1);
  }
  LogprobsOptions flat = o;
  flat.peaks = 0;
  const std::vector<float> row =
      whole(*random_inputs(generated_workload(flat, 1), flat), 0, o.vocab);
  EXPECT_LT(*std::max_element(row.begin(), row.end()), 4);
}

TEST(LogprobsInputs, TargetsAreMostlyPeaksAndIdsBeginWithThem) {
  const LogprobsOptions o = options_of(32768);
  const auto inputs = random_inputs(generated_workload(o, 400), o);
  int peaks = 0;
  std::vector<int32_t> ids(o.picks);
  for (int64_t token = 0; token < 400; ++token) {
    inputs->ids(token, ids);
    for (const int32_t id : ids) EXPECT_TRUE(id >= 0 && id < o.vocab);
    const std::set<int32_t> first(ids.begin(), ids.begin() + o.peaks);
    peaks += first.contains(inputs->target(token)) ? 1 : 0;
    float z = 0;
    inputs->row(TokenTensor::logits, token, ids[0], std::span(&z, 1));
    EXPECT_GT(z, o.peak_height - 4);
  }
  EXPECT_NEAR(peaks, 300, 40);
}

TEST(LogprobsInputs, ZeroFractionOfTokens) {
  LogprobsOptions o = options_of(100);
  o.zero_fraction = 0.25;
  const auto inputs = random_inputs(generated_workload(o, 1000), o);
  int zeros = 0;
  for (int64_t token = 0; token < 1000; ++token) {
    const bool zero = inputs->gradient(token, 0) == 0;
    zeros += zero ? 1 : 0;
    EXPECT_EQ(inputs->gradient(token, 1) == 0, zero);
    EXPECT_EQ(inputs->gradient(token, 9) == 0, zero);
  }
  EXPECT_NEAR(zeros, 250, 50);
  o.zero_fraction = 1;
  EXPECT_EQ(random_inputs(generated_workload(o, 1), o)->gradient(0, 0), 0);
}

TEST(LogprobsInputs, VocabulariesSmallerThanTheirPeaks) {
  const LogprobsOptions o = options_of(3);
  const auto inputs = random_inputs(generated_workload(o, 50), o);
  for (int64_t token = 0; token < 50; ++token) {
    EXPECT_LT(inputs->target(token), 3);
    for (const float z : whole(*inputs, token, 3)) EXPECT_TRUE(std::isfinite(z));
  }
}

TEST(LogprobsWorkload, Sequences) {
  LogprobsOptions o = options_of(10);
  o.sequences = 3;
  const LogprobsWorkload problem = generated_workload(o, 10);
  EXPECT_EQ(problem.offsets, (std::vector<int64_t>{0, 3, 6, 10}));
  EXPECT_EQ(problem.longest(), 4);
  EXPECT_EQ(problem.origin, "10 tokens in 3 sequences");
  o.generate = "dist=fixed,length=7,count=2";
  o.capacity = 100;
  EXPECT_EQ(generated_workload(o, 10).offsets, (std::vector<int64_t>{0, 7, 14}));
}

LogprobsFile small_file() {
  LogprobsFile file;
  file.vocab_size = 3;
  file.columns = 5;
  file.picks = 1;
  file.top_k = 2;
  file.temperature = 1.5;
  file.offsets = {0, 2};
  const std::vector<float> logits{1, 2, 3, 1e30F, 1e30F, 4, 5, 6, NAN, 0.1F};
  file.arrays.set("logits", logits);
  file.arrays.set("teacher", logits);
  file.arrays.set("targets", std::vector<int32_t>{-100, 2});
  file.arrays.set("ids", std::vector<int32_t>{0, 1});
  file.arrays.set("d_value", std::vector<float>{0.5F, 0});
  file.reference.emplace().arrays = {{"logprob", {1, 2}},   {"soft_cross_entropy", {3, 4}},
                                     {"d_log_softmax", {}}, {"linear_logprob", {}},
                                     {"d_logprob", {}},     {"distilled_teacher_logprob", {}}};
  return file;
}

TEST(LogprobsWorkload, OfAFile) {
  const LogprobsFile file = small_file();
  LogprobsOptions o;
  o.input = "f.h5";
  o.tp = 2;
  const LogprobsWorkload problem = workload_of(file, o);
  EXPECT_EQ(problem.vocab.offsets, (std::vector<int64_t>{0, 3, 5}));
  EXPECT_EQ(problem.vocab.vocab_size, 3);
  EXPECT_EQ(problem.filter.top_k, 2);
  EXPECT_EQ(problem.filter.temperature, 1.5);
  EXPECT_EQ(o.vocab, 3);
  EXPECT_EQ(o.temperature, 1.5);
  o.shards = "1,4";
  EXPECT_EQ(workload_of(file, o).vocab.offsets, (std::vector<int64_t>{0, 1, 5}));
  o.shards = "1,3";
  test::expect_usage("--shards 1,3 are 4 columns; f.h5 has 5", [&] { workload_of(file, o); });
}

TEST(LogprobsWorkload, FiltersOfTokensOfAFile) {
  LogprobsFile file = small_file();
  LogprobsOptions o;
  o.tp = 1;
  EXPECT_FALSE(workload_of(file, o).per_token());
  file.arrays.set("top_p", std::vector<double>{0.5, 1});
  file.arrays.set("top_k", std::vector<int32_t>{0, 3});
  EXPECT_TRUE(workload_of(file, o).per_token());
  EXPECT_EQ(workload_of(file, o).of_tokens, (std::vector<std::string>{"top_k", "top_p"}));
  const auto inputs = inputs_of(file, DType::f32);
  EXPECT_EQ(inputs->filter(0).top_p, 0.5);
  EXPECT_EQ(inputs->filter(0).top_k, 0);
  EXPECT_EQ(inputs->filter(1).top_k, 3);
  EXPECT_EQ(inputs->filter(1).temperature, 1.5);  // of all tokens
  EXPECT_EQ(inputs->filter(1).min_p, 0);
}

TEST(LogprobsInputs, MadeUpFiltersOfTokensAreAroundThoseOfTheRun) {
  LogprobsOptions o = options_of(300);
  o.filter_per_token = true;
  o.top_k = 40;
  o.min_p = 0.1;
  o.temperature = 2;
  const LogprobsWorkload problem = generated_workload(o, 200);
  EXPECT_TRUE(problem.per_token());
  const auto inputs = random_inputs(problem, o);
  std::set<int64_t> top_ks;
  int free_of_k = 0, free_of_p = 0, free_of_min = 0;
  for (int64_t t = 0; t < 200; ++t) {
    const SamplingFilter one = inputs->filter(t);
    EXPECT_TRUE(one.top_k >= 0 && one.top_k <= 40) << one.top_k;
    EXPECT_TRUE(one.top_p >= 0.9 && one.top_p <= 1) << one.top_p;
    EXPECT_TRUE(one.min_p >= 0 && one.min_p <= 0.1) << one.min_p;
    EXPECT_TRUE(one.temperature >= 1 && one.temperature <= 4) << one.temperature;
    top_ks.insert(one.top_k);
    free_of_k += one.top_k == 0 ? 1 : 0;
    free_of_p += one.top_p == 1 ? 1 : 0;
    free_of_min += one.min_p == 0 ? 1 : 0;
  }
  EXPECT_GT(top_ks.size(), 20U);
  for (const int count : {free_of_k, free_of_p, free_of_min}) EXPECT_TRUE(count > 25 && count < 80);
  o.top_k = 0, o.top_p = 1, o.min_p = 0;
  EXPECT_FALSE(random_inputs(generated_workload(o, 2), o)->filter(1).active());
}

TEST(LogprobsInputs, KeptIdsAreDifferentOnes) {
  LogprobsOptions o = options_of(300);
  o.picks = 12;
  const auto inputs = random_inputs(generated_workload(o, 100), o);
  std::set<size_t> sizes;
  int with_target = 0;
  for (int64_t t = 0; t < 100; ++t) {
    const std::vector<int32_t> kept = inputs->kept(t);
    sizes.insert(kept.size());
    EXPECT_EQ(std::set<int32_t>(kept.begin(), kept.end()).size(), kept.size());
    for (const int32_t id : kept) EXPECT_TRUE(id >= 0 && id < 300);
    with_target += std::ranges::find(kept, inputs->target(t)) != kept.end() ? 1 : 0;
  }
  EXPECT_EQ(*sizes.begin(), 0U);
  EXPECT_EQ(*sizes.rbegin(), 12U);
  EXPECT_TRUE(with_target > 60 && with_target < 95) << with_target;
  LogprobsFile file = small_file();
  LogprobsOptions of_file;
  of_file.tp = 1;
  EXPECT_FALSE(workload_of(file, of_file).inputs.contains("sampling_mask_ids"));
  file.arrays.set("sampling_mask_offsets", std::vector<int64_t>{0, 0, 2});
  file.arrays.set("sampling_mask_ids", std::vector<int32_t>{2, 0});
  EXPECT_TRUE(workload_of(file, of_file).inputs.contains("sampling_mask_ids"));
  EXPECT_TRUE(inputs_of(file, DType::f32)->kept(0).empty());
  EXPECT_EQ(inputs_of(file, DType::f32)->kept(1), (std::vector<int32_t>{2, 0}));
}

TEST(LogprobsInputs, ProjectionsHaveColumnsAndIdsWithNoneAndWithSeveralEntries) {
  LogprobsOptions o = options_of(300);
  o.picks = 200;
  const auto inputs = random_inputs(generated_workload(o, 5), o);
  const SparseMatrix made = inputs->projection();
  EXPECT_EQ(fault_of(made.ref(), 300, ""), "");
  EXPECT_EQ(made.width, 200);
  std::vector<int> of_columns(200, 0);
  for (const int32_t c : made.columns) ++of_columns[c];
  int64_t most = 0;
  bool some_without = false;
  for (size_t v = 0; v < 300; ++v) {
    most = std::max(most, made.offsets[v + 1] - made.offsets[v]);
    some_without = some_without || made.offsets[v + 1] == made.offsets[v];
  }
  EXPECT_TRUE(some_without && most > 3) << most;
  EXPECT_EQ(std::ranges::min(of_columns), 0);
  EXPECT_EQ(std::ranges::max(of_columns), 7);
  LogprobsFile file = small_file();
  LogprobsOptions of_file;
  of_file.tp = 1;
  EXPECT_EQ(workload_of(file, of_file).projected, 0);
  file.projected = 2;
  file.arrays.set("projection_offsets", std::vector<int64_t>(file.vocab_size + 1, 0));
  EXPECT_EQ(workload_of(file, of_file).projected, 2);
  std::vector<float> g(2);
  inputs_of(file, DType::f32)->d_projected(1, g);  // without an array, d_value
  EXPECT_EQ(g, std::vector<float>(2, file.floats("d_value")[1]));
  file.arrays.set("d_projected", std::vector<float>{3, 3, 3, 5});
  inputs_of(file, DType::f32)->d_projected(1, g);
  EXPECT_EQ(g, (std::vector<float>{3, 5}));
}

/// The arrays whose answers a run of these types does not compare.
std::vector<std::string> dropped(const LogprobsFile& file, DType type,
                                 std::optional<DType> output_type = {}) {
  const auto inputs = inputs_of(file, type, output_type);
  std::vector<std::string> names;
  for (const auto& [name, values] : file.reference->arrays) {
    EXPECT_EQ(inputs->answers(name) == nullptr, !inputs->rounded_input_of(name).empty()) << name;
    if (inputs->answers(name) == nullptr) names.push_back(name);
  }
  return names;
}
using Names = std::vector<std::string>;

// 0.1 in a padded column is no reason to do without the file's answers; in a logit it is, for those
// that depend on it.
TEST(LogprobsInputs, AnswersOfAFileBelongToExactInputs) {
  LogprobsFile file = small_file();
  EXPECT_EQ(dropped(file, DType::f32), Names{});
  EXPECT_EQ(dropped(file, DType::bf16), Names{});
  file.arrays.set("teacher", std::vector<float>{1, 2, 3, 0, 0, 0.1F, 5, 6, 0, 0});
  EXPECT_EQ(dropped(file, DType::f32), Names{});
  EXPECT_EQ(dropped(file, DType::bf16), (Names{"distilled_teacher_logprob", "soft_cross_entropy"}));
  EXPECT_EQ(inputs_of(file, DType::bf16)->rounded_input_of("soft_cross_entropy"),
            "/logprobs/teacher");
  EXPECT_EQ(whole(*inputs_of(file, DType::bf16), 1, 3, TokenTensor::teacher)[0],
            to_float(to_bf16(0.1F)));
  file.arrays.set("teacher_values", std::vector<float>{1, 2});
  EXPECT_EQ(dropped(file, DType::bf16), Names{"soft_cross_entropy"});
  file.reference->arrays["topk_kl"] = {};
  EXPECT_EQ(dropped(file, DType::bf16), (Names{"soft_cross_entropy", "topk_kl"}));
  for (const char* name : {"teacher_logprobs", "teacher_target_logprobs"})
    file.arrays.set(name, std::vector<float>{-0.1F, -0.1F});  // in f32, instead of the rows
  EXPECT_EQ(dropped(file, DType::bf16), Names{"soft_cross_entropy"});
  float logprob = 0;
  inputs_of(file, DType::bf16)->row_of_input("teacher_logprobs", 1, std::span(&logprob, 1));
  EXPECT_EQ(logprob, -0.1F);
  file.rounded = {"/logprobs/teacher_target_logprobs"};
  EXPECT_EQ(dropped(file, DType::f32), Names{"topk_kl"});
  file = small_file();
  file.arrays.set("d_value", std::vector<float>{0.1F, 0});
  EXPECT_EQ(dropped(file, DType::bf16), Names{"d_log_softmax"}) << "others take it in f32";
  EXPECT_EQ(dropped(file, DType::bf16, DType::f32), Names{});
  file.rounded = {"/logprobs/d_value"};
  EXPECT_EQ(dropped(file, DType::f32), (Names{"d_log_softmax", "d_logprob"}));
  EXPECT_EQ(inputs_of(file, DType::f32)->target(0), -100);
  EXPECT_EQ(inputs_of(file, DType::f32)->rounded_input_of("d_log_softmax"), "/logprobs/d_value");
  EXPECT_EQ(inputs_of(small_file(), DType::f32)->gradient(0, 1), 0.5F);
  EXPECT_EQ(inputs_of(small_file(), DType::f32)->gradient(0, 2), 0.5F);
}

TEST(LogprobsInputs, GradientsOfIdsAndOfEntropies) {
  LogprobsFile file = small_file();
  file.arrays.set("d_entropies", std::vector<float>{2, 3});
  std::vector<float> of_ids(2 * file.picks);
  std::iota(of_ids.begin(), of_ids.end(), 10.0F);
  file.arrays.set("d_ids", of_ids);
  const auto inputs = inputs_of(file, DType::f32);
  EXPECT_EQ(inputs->gradient(0, 0), 0.5F);
  EXPECT_EQ(inputs->gradient(1, 1), 3);
  EXPECT_EQ(inputs->gradient(1, 2 + file.picks - 1), of_ids.back());
  file.reference->arrays["d_gathered"] = file.reference->arrays["d_entropy"] = {};
  file.rounded = {"/logprobs/d_ids"};
  EXPECT_EQ(dropped(file, DType::f32), Names{"d_gathered"});
  file.rounded = {"/logprobs/d_entropies"};
  EXPECT_EQ(dropped(file, DType::f32), Names{"d_entropy"});
}

std::vector<float> gradients_of_ids(const LogprobsInputs& inputs, int64_t token, int64_t columns) {
  std::vector<float> row(columns);
  inputs.d_logprobs(token, 0, row);
  return row;
}

TEST(LogprobsInputs, GradientsOfAllIds) {
  LogprobsFile file = small_file();
  const auto row = gradients_of_ids(*inputs_of(file, DType::f32), 0, 5);
  for (size_t v = 0; v < 5; ++v) EXPECT_TRUE(v < 3 ? row[v] == 0.5F : std::isnan(row[v])) << v;
  file.arrays.set("d_logprobs", std::vector<float>{1, 2, 3, 4, 5, 0.1F});
  EXPECT_EQ(gradients_of_ids(*inputs_of(file, DType::f32), 1, 3), (std::vector<float>{4, 5, 0.1F}));
  EXPECT_EQ(gradients_of_ids(*inputs_of(file, DType::bf16), 1, 3)[2], to_float(to_bf16(0.1F)));
  EXPECT_EQ(dropped(file, DType::bf16), Names{"d_log_softmax"});
  EXPECT_EQ(dropped(file, DType::bf16, DType::f32), Names{});
  LogprobsOptions o = options_of(50);
  o.zero_fraction = 0.5;
  const auto made_up = random_inputs(generated_workload(o, 40), o);
  for (int64_t t = 0; t < 40; ++t) {
    const auto all = gradients_of_ids(*made_up, t, 52);
    EXPECT_EQ(all[7] == 0, made_up->gradient(t, 0) == 0) << t;
    EXPECT_TRUE(std::isnan(all[50]) && std::isnan(all[51]));
  }
}

LogprobsFile linear_file() {
  LogprobsFile file = small_file();
  file.hidden = 2;
  file.arrays.set("hidden", std::vector<float>{3, 4, 1, 0});
  file.arrays.set("head", std::vector<float>{0, 0, 0, 1, 5, 12});
  return file;
}

TEST(LogprobsWorkload, HiddenStatesAreThoseOfTheFile) {
  const LogprobsFile file = linear_file();
  LogprobsOptions o;
  o.input = "f.h5";
  o.tp = 1;
  LogprobsOptions usual = o;
  EXPECT_FALSE(workload_of(small_file(), usual).inputs.contains("hidden"));
  EXPECT_EQ(workload_of(file, o).hidden, 2);
  o.hidden = 24;
  test::expect_usage("--hidden is that of the hidden states of f.h5, 2: leave it out",
                     [&] { workload_of(file, o); });
  test::expect_usage("--hidden 24: f.h5 has no hidden states; leave it out",
                     [&] { workload_of(small_file(), o); });
}

TEST(LogprobsInputs, HiddenStatesOfAFile) {
  LogprobsFile file = linear_file();
  EXPECT_FALSE(inputs_of(small_file(), DType::f32)->linear().has_value());
  // 5 · 13 / √2
  EXPECT_DOUBLE_EQ(inputs_of(file, DType::f32)->linear()->logit_size(), 65 / std::sqrt(2));
  file.arrays.set("head", std::vector<float>{0, 0, 0, 0.1F, 5, 12});
  EXPECT_EQ(dropped(file, DType::f32), Names{});
  EXPECT_EQ(dropped(file, DType::bf16), Names{"linear_logprob"});
}

// An element of 1e30 in each factor makes logits that float32 does not hold; one of 1e20 does not,
// but does where the temperature, or an upstream gradient, is as large.
TEST(LogprobsWorkload, ProductsOfHiddenStatesStayInFloat32) {
  const auto refusal = [](float hidden, float head, double temperature, float d_value,
                          const char* pass) {
    LogprobsFile file = linear_file();
    file.arrays.set("hidden", std::vector<float>{hidden, 0, 0, 1});
    file.arrays.set("head", std::vector<float>{0, 0, 0, 1, head, 0});
    file.arrays.set("d_value", std::vector<float>{d_value, 0});
    file.temperature = temperature;
    LogprobsOptions o;
    o.tp = 1;
    o.pass = pass;
    const auto refused = workload_of(file, o).refused;
    return refused.contains("hidden") ? refused.at("hidden") : "";
  };
  EXPECT_EQ(refusal(1e18F, 1e19F, 1, 1, "both"), "");
  EXPECT_EQ(refusal(1e20F, 1e20F, 1, 1, "fwd"),
            "hidden states and head make logits of up to 1e+40; at most 1.7e+38");
  EXPECT_NE(refusal(1e15F, 1e15F, 1e-10, 1, "fwd"), "");
  EXPECT_NE(refusal(1, 1e15F, 1, 1e25F, "both").find("gradients of hidden states"),
            std::string::npos);
  EXPECT_NE(refusal(1e15F, 1, 1, 1e25F, "both").find("gradients of the head"), std::string::npos);
  EXPECT_EQ(refusal(1, 1e15F, 1, 1e25F, "fwd"), "");
}

TEST(FillLogits, PaddingOfAStreamIsNaN) {
  const LogprobsFile file = small_file();
  const auto inputs = inputs_of(file, DType::bf16);
  LogitMatrix matrix(3, 2, DType::bf16);
  const std::vector<int64_t> tokens{1, -1, 0};
  HostStream host;
  fill_logits(*inputs, TokenTensor::logits, tokens, 1, matrix.ref(), host);
  EXPECT_EQ(matrix.ref().at(0, 0), 5);
  EXPECT_EQ(matrix.ref().at(0, 1), 6);
  EXPECT_TRUE(std::isnan(matrix.ref().at(1, 0)));
  EXPECT_EQ(matrix.ref().at(2, 1), 3);
}

/// All elements of a matrix are equal.
bool same(ConstMatrixRef a, ConstMatrixRef b) {
  for (int64_t r = 0; r < a.rows; ++r)
    for (int64_t c = 0; c < a.cols; ++c)
      if (a.at(r, c) != b.at(r, c)) return false;
  return a.rows == b.rows && a.cols == b.cols;
}

void fill(MatrixRef m, float value) {
  for (int64_t r = 0; r < m.rows; ++r)
    for (int64_t c = 0; c < m.cols; ++c) m.as<float>()(r, c) = value;
}

TEST(LogprobsRows, LogitsComeBackWhenGradientsHaveTakenTheirPlace) {
  const LogprobsOptions o = options_of(30);
  const LogprobsWorkload problem = generated_workload(o, 5);
  const auto inputs = random_inputs(problem, o);
  HostStream host;
  LogprobsRows original(problem, *inputs, {4, 2, 0}, 0, true, host);
  for (const bool in_place : {true, false}) {
    LogprobsRows rows(problem, *inputs, {4, 2, 0}, 0, in_place, host);
    rows.restore();  // nothing to do yet
    for (int round = 0; round < 2; ++round) {
      rows.prepare_gradient();
      EXPECT_TRUE(same(rows.logits(), original.logits())) << in_place << round;
      EXPECT_EQ(rows.d_logits().data == rows.logits().data, in_place);
      fill(rows.d_logits(), 7);
    }
    EXPECT_EQ(same(rows.logits(), original.logits()), !in_place);
    rows.restore();
    EXPECT_TRUE(same(rows.logits(), original.logits())) << in_place;
    rows.clobber();
    EXPECT_TRUE(std::isnan(rows.d_logits().at(1, 1)));
    rows.restore();
    EXPECT_TRUE(same(rows.logits(), original.logits())) << in_place;
    rows.poison();
    EXPECT_TRUE(same(rows.logits(), original.logits())) << in_place;
  }
}

TEST(LogprobsRows, PaddingHasIdsAndNoGradient) {
  const LogprobsOptions o = options_of(30);
  const LogprobsWorkload problem = generated_workload(o, 5);
  const auto inputs = random_inputs(problem, o);
  HostStream host;
  LogprobsRows rows(problem, *inputs, {-1, 3}, 0, true, host);
  EXPECT_EQ(rows.targets()[0], 0);
  EXPECT_EQ(rows.targets()[1], inputs->target(3));
  EXPECT_EQ(rows.gradients(1), (std::vector<float>{0, inputs->gradient(3, 1)}));
  EXPECT_TRUE(std::isnan(rows.logits().at(0, 0)));
}

// Where a row is certain, a and b log p vanish, but not the errors of the entropy in a.
TEST(RowGradientTerms, ScalesOfACertainRow) {
  const std::vector<int32_t> ids{1, 1, -100, 2};
  const std::vector<double> weights{0.5, -0.25, 9, 3};
  const RowGradientTerms terms{{0, -HUGE_VAL, -1}, 0, -2, ids, weights};
  const std::vector<double> scales = terms.scales();
  EXPECT_DOUBLE_EQ(scales[0], 2);
  EXPECT_DOUBLE_EQ(scales[1], 0.75);
  EXPECT_DOUBLE_EQ(scales[2], std::exp(-1) * 2 * 2 + 3);
}

TEST(CompareRow, PaddingIsZeroAndNaNIsNaN) {
  std::vector<double> d{0.5, NAN, 0, 0};
  ExpectedRow want{{9, 0.5, NAN}, {1, 1, 1}};
  ResultArray array{"d_logprob", {1, 3}, "d_logits"};
  array.first = 1, array.columns = 4, array.rows = {0};
  const auto check = [&](const double* answer = nullptr) {
    Check all("d_logits", 1e-3);
    compare_row(array, 0, d, want, answer, all);
    EXPECT_EQ(all.count(), 4);
    return all;
  };
  EXPECT_EQ(check().outside(), 1) << "NaN is no value";
  want.undefined = true;
  EXPECT_EQ(check().outside(), 0);
  const std::vector<double> answers{9, 0.5, NAN};
  EXPECT_EQ(check(answers.data()).outside(), 1);
  d[3] = 0.1;  // padding
  EXPECT_EQ(check().outside(), 1);
  d[1] = 0;  // NaN is wanted
  EXPECT_EQ(check().outside(), 2);
  d[0] = 0.6;
  EXPECT_EQ(check().outside(), 3);
  EXPECT_EQ(check().deviations().at(1).where, "d_logprob[0, 4]");
}

TEST(CompareRow, AnInfinityIsOneOfTheDefinition) {
  ResultArray array{"gathered", {1, 2}, "log-probabilities"};
  array.columns = 2, array.rows = {0};
  const std::vector<double> got{-HUGE_VAL, -HUGE_VAL}, answer{-HUGE_VAL, -HUGE_VAL};
  Check check("x", 1e-3);
  compare_row(array, 0, got, {{-HUGE_VAL, -2}, {1, 1}}, answer.data(), check);
  EXPECT_EQ(check.outside(), 1);
  EXPECT_EQ(check.where(), "/reference/gathered[0, 1]");
}

TEST(CompareRow, AnAnswerTakesThePlaceOfTheDefinition) {
  ResultArray array{"gathered", {1, 2}, "log-probabilities"};
  array.columns = 2, array.rows = {0};
  const ExpectedRow definition{{-1, -2}, {1, 1}};
  const std::vector<double> answer{-1, -2.5}, got{-1, -2};
  Check check("x", 1e-3);
  compare_row(array, 0, got, definition, answer.data(), check);
  EXPECT_EQ(check.outside(), 1);
  EXPECT_EQ(check.where(), "/reference/gathered[0, 1]");
  array.is_as_right = [](size_t, int64_t column, double, double) { return column == 1; };
  Check lenient("x", 1e-3);
  compare_row(array, 0, got, definition, answer.data(), lenient);
  EXPECT_TRUE(lenient.passed());
}

TEST(CompareRow, WhatIsNotComparedIsNotCounted) {
  ResultArray array{"next_token_logprob", {1, 2}, "log-probabilities"};
  array.rows = {0};
  Check check("x", 1e-3);
  compare_row(array, 0, std::vector<double>{7, 8}, {{1, 2}, {-1, -1}}, nullptr, check);
  EXPECT_EQ(check.count(), 0);
  EXPECT_FALSE(check.passed());
}

TEST(CompareRow, AnAnswerOfAnotherRightRowIsHeldAgainstIt) {
  ResultArray array{"filtered_logprob", {1, 2}, "log-probabilities"};
  array.rows = {0};
  const ExpectedRow want{{-1, -2}, {1, 1}, {NAN, -3}, {NAN, 1}};
  const auto outside = [&](const std::vector<double>& got, const std::vector<double>& answer) {
    Check check("x", 1e-3);
    compare_row(array, 0, got, want, answer.data(), check);
    EXPECT_EQ(check.count(), 3);
    return check.outside() == 0 ? "" : check.where();
  };
  EXPECT_EQ(outside({-1, -2}, {-1, -3}), "");
  EXPECT_EQ(outside({-1, -2}, {-1, -2}), "/reference/filtered_logprob[0, 1], the answer itself");
  EXPECT_EQ(outside({-1, -3}, {-1, -3}), "filtered_logprob[0, 1]");
  EXPECT_EQ(outside({-1, -2}, {-5, -3}), "/reference/filtered_logprob[0, 0]");
}

}  // namespace GYRE_FILE
}  // namespace gyre
