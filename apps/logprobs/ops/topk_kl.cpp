// topk-kl, topk-kl-advantage: divergence of a student from a teacher, of the student's --picks
// largest ids, and of the target as a sample of the others; with two gradients of that sample.
//
// References: top_k_divergence_reference and top_k_divergence_gradient_reference. With a teacher's
// rows, forward finds the ids and does one all-gather of 24 + 12 min(K, most columns of a rank)
// bytes per row; with a file's log-probabilities of ids, of 4 (3 + K). Backward sends nothing.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "apps/logprobs/operation.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/top_k_divergence.hpp"

namespace gyre {
namespace {

class TopKDivergenceOp final : public RowsOp {
 public:
  TopKDivergenceOp(LogprobsContext& context, TailGradient tail)
      : RowsOp(context),
        tail_(tail),
        is_given_(context.problem.inputs.contains("teacher_logprobs")),
        k_(context.problem.top),
        values_(rows_.rows()),
        d_values_(rows_.gradients(0)) {
    if (!is_given_) teacher_ = rows_.teacher();
    of_ids_.resize(is_given_ ? rows_.rows() * k_ : 0);
    of_targets_.resize(is_given_ ? rows_.rows() : 0);
    for (int64_t r = 0; is_given_ && r < rows_.rows(); ++r) {
      context.inputs.row_of_input("teacher_logprobs", token(r),
                                  std::span(of_ids_).subspan(r * k_, k_));
      context.inputs.row_of_input("teacher_target_logprobs", token(r),
                                  std::span(of_targets_).subspan(r, 1));
    }
  }
  void start() override {
    const TopKDivergenceOptions options{k_,        tail_,       is_given_, c_.options.threads,
                                        kernels(), &tp_arrays()};
    auto scores = std::make_shared<TopKDivergence>(rows_.rows(), vocab(), options, tp());
    forward_ = [this, scores] {
      if (is_given_)
        scores->forward(rows_.logits(), TeacherLogprobs{rows_.ids(), of_ids_, of_targets_},
                        rows_.targets(), stream(), values_.span());
      else
        scores->forward(rows_.logits(), teacher_, rows_.targets(), stream(), values_.span());
    };
    backward_ = [this, scores] { scores->backward(rows_.logits(), d_values_, rows_.d_logits()); };
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (pass == Pass::backward) return SentTraffic{};
    if (is_given_) return all_gather_of(tp(), 4 * rows_.rows() * (3 + k_));
    int64_t most = 0;
    for (int r = 0; r < vocab().ranks(); ++r) most = std::max(most, vocab().valid(r));
    return all_gather_of(tp(), rows_.rows() * (24 + 12 * std::min(k_, most)));
  }
  double ideal_bytes(Pass pass) const override {
    if (pass == Pass::backward) return RowsOp::ideal_bytes(pass);
    return (is_given_ ? 1 : 2) * shard_bytes(rows_.rows());
  }

 private:
  std::vector<std::span<float>> outputs() override { return {values_.span()}; }
  bool has_gradient(int64_t r) const override { return d_values_[r] != 0; }
  TopKDivergenceReference wanted(int64_t r) const {
    const bool unbiased = tail_ == TailGradient::unbiased;
    const int32_t target = rows_.targets()[r];
    if (!is_given_)
      return top_k_divergence_reference(row_of(r), k_, whole_row(token(r), TokenTensor::teacher),
                                        target, unbiased);
    const auto own = std::span(of_ids_).subspan(r * k_, k_);
    std::vector<double> log_p(own.begin(), own.end());
    log_p.push_back(of_targets_[r]);
    return top_k_divergence_reference(row_of(r), rows_.ids().subspan(r * k_, k_), log_p, target,
                                      unbiased);
  }
  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::backward)
      return {row_gradient(tail_ == TailGradient::unbiased ? "d_topk_kl" : "d_topk_kl_advantage",
                           [this](size_t r) { return expected_gradient(r); })};
    return {row_values("topk_kl", "divergences", values_.span(), 0, [this](size_t r) {
      const TopKDivergenceReference want = wanted(r);
      ExpectedRow row{{want.value}, {0}};
      for (const double size : sizes(want)) row.scales[0] += size;
      if (!std::isfinite(row.scales[0])) row.scales[0] = 1;
      row.undefined = std::isnan(want.value);
      return row;
    })};
  }
  /// Error scales of the terms, [ids].
  std::vector<double> sizes(const TopKDivergenceReference& of) const {
    std::vector<double> all;
    const size_t count = k_;
    for (size_t k = 0; k < of.ids.size(); ++k)
      all.push_back(divergence_scale(of.log_q[k], of.log_p[k], k == count));
    return all;
  }
  ExpectedRow expected_gradient(int64_t r) const {
    const std::vector<double> row = row_of(r);
    const TopKDivergenceReference of = wanted(r);
    const double g = d_values_[r];
    ExpectedRow want{top_k_divergence_gradient_reference(row, of, g), {}};
    want.undefined = std::ranges::any_of(want.values, [](double x) { return std::isnan(x); });
    RowGradientTerms terms{log_softmax_reference(row)};
    std::vector<double> weights;
    for (const double size : sizes(of)) {
      weights.push_back(std::abs(g) * size);
      terms.a += std::abs(g) * size;
    }
    double sum = 0;  // the coefficient of q, which a sampled term makes larger than its error
    for (const double slope : of.slopes) sum += g * slope;
    if (std::isfinite(sum)) terms.a = std::max(terms.a, std::abs(sum));
    terms.ids = of.ids;
    terms.weights = weights;
    want.scales = terms.scales();
    if (!want.undefined) return want;
    for (size_t v = 0; v < row.size(); ++v) want.scales[v] = row[v] == -HUGE_VAL ? -1 : 1;
    return want;
  }

  TailGradient tail_;
  bool is_given_;  // the file has log-probabilities of ids
  int64_t k_;
  MatrixRef teacher_;
  std::vector<float> of_ids_, of_targets_;  // by the teacher, [rows, K] and [rows]
  Buffer<float> values_;
  std::vector<float> d_values_;
};

std::string few_ids(const LogprobsWorkload& problem, const LogprobsOptions&) {
  if (problem.top <= most_divergence_ids) return "";
  return fmt::format("{} ids of a token, with its target one more; at most {}", problem.top,
                     most_divergence_ids);
}

LogprobsOperation divergence_family(const char* name, const char* summary, const char* gradient,
                                    TailGradient tail) {
  const std::vector<std::string> reads{"logits", "teacher_logprobs", "teacher_target_logprobs"};
  std::vector<std::string> gradient_reads = reads;
  gradient_reads.emplace_back("d_value");
  return {.name = name,
          .summary = summary,
          .definition = "top_k_divergence_reference, top_k_divergence_gradient_reference",
          .methods = {{"gyre", makes<TopKDivergenceOp>(tail), 0, few_ids}},
          .backward = RowTraffic::updates,
          .matrices = {.always = 1},
          .needs = {{"ids"}, {"teacher", "teacher_logprobs"}},
          .arrays = {{"topk_kl", "T", false, reads}, {gradient, "TV", false, gradient_reads}}};
}

}  // namespace

LogprobsOperation topk_kl_operation() {
  return divergence_family("topk-kl", "divergence of the --picks largest ids and a sampled tail",
                           "d_topk_kl", TailGradient::unbiased);
}

LogprobsOperation topk_kl_advantage_operation() {
  return divergence_family(
      "topk-kl-advantage",
      "divergence of the --picks largest ids, gradient of a policy's advantage",
      "d_topk_kl_advantage", TailGradient::advantage);
}

}  // namespace gyre
