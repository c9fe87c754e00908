// distill, distill-renormalised: a student's log-probabilities of a teacher's --picks ids. distill
// normalises over the vocabulary and adds the entropy; the other over the ids alone.
//
// References: distillation_reference and distillation_gradient_reference. Forward does one
// all-gather of 4 (3 + K) bytes per row or, renormalised, one all-reduce of 4 K bytes per row.
// Backward sends nothing.

#include "logprobs/distillation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "apps/logprobs/operation.hpp"
#include "core/special_values.hpp"
#include "logprobs/reference.hpp"

namespace gyre {
namespace {

class DistillationOp final : public RowsOp {
 public:
  DistillationOp(LogprobsContext& context, bool renormalised)
      : RowsOp(context),
        renormalised_(renormalised),
        picks_(context.problem.picks),
        values_(rows_.rows() * picks_),
        d_values_(rows_.gradients(2, picks_)),
        teacher_logits_(rows_.rows() * picks_),
        teacher_(rows_.rows() * picks_),
        entropy_(renormalised ? 0 : rows_.rows()),
        d_entropy_(rows_.gradients(1, renormalised ? 0 : 1)) {
    for (int64_t i = 0; i < teacher_logits_.size(); ++i)
      teacher_logits_[i] =
          context.inputs.teacher_value(token(i / picks_), i % picks_, rows_.ids()[i]);
  }
  void start() override {
    const DistillationOptions options{picks_,    renormalised_, !renormalised_, c_.options.threads,
                                      kernels(), &tp_arrays()};
    auto scores = std::make_shared<DistillationScores>(rows_.rows(), vocab(), options, tp());
    forward_ = [this, scores] {
      scores->forward(rows_.logits(), teacher_logits_.span(), rows_.ids(), stream(), values_.span(),
                      teacher_.span(), entropy_.span());
    };
    backward_ = [this, scores] {
      scores->backward(rows_.logits(), rows_.ids(), d_values_, d_entropy_, rows_.d_logits());
    };
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (pass == Pass::backward) return SentTraffic{};
    if (renormalised_) return all_reduce_of(tp(), 4 * rows_.rows() * picks_);
    return all_gather_of(tp(), 4 * rows_.rows() * (3 + picks_));
  }
  double ideal_bytes(Pass pass) const override {
    const double once = shard_bytes(rows_.rows());
    if (pass == Pass::forward) return renormalised_ ? nan_of<double> : once;
    return renormalised_ ? once : 2 * once;
  }

 private:
  std::vector<std::span<float>> outputs() override {
    return {values_.span(), teacher_.span(), entropy_.span()};
  }
  std::span<const int32_t> ids_of(int64_t r) const {
    return rows_.ids().subspan(r * picks_, picks_);
  }
  DistillationReference wanted(int64_t r) const {
    const float* first = teacher_logits_.data() + r * picks_;
    const std::vector<double> teacher(first, first + picks_);
    return distillation_reference(row_of(r), ids_of(r), teacher, renormalised_);
  }
  static ExpectedRow scaled(const std::vector<double>& logprobs) {
    ExpectedRow want = scored(logprobs);
    want.undefined = std::ranges::any_of(logprobs, [](double x) { return std::isnan(x); });
    return want;
  }
  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::backward)
      return {row_gradient(renormalised_ ? "d_distilled_renormalised" : "d_distilled",
                           [this](size_t r) { return expected_gradient(r); })};
    std::vector<ResultArray> arrays{
        row_values(renormalised_ ? "distilled_renormalised_logprob" : "distilled_logprob",
                   "student", values_.span(), picks_,
                   [this](size_t r) { return scaled(wanted(r).student); }),
        row_values(
            renormalised_ ? "distilled_renormalised_teacher_logprob" : "distilled_teacher_logprob",
            "teacher", teacher_.span(), picks_,
            [this](size_t r) { return scaled(wanted(r).teacher); })};
    if (!renormalised_)
      arrays.push_back(
          row_values("distilled_entropy", "entropies", entropy_.span(), 0, [this](size_t r) {
            return ExpectedRow{{wanted(r).entropy}, {entropy_scale(vocab().vocab_size)}};
          }));
    return arrays;
  }
  ExpectedRow expected_gradient(int64_t r) const {
    const auto first = d_values_.begin() + r * picks_;
    const std::vector<double> row = row_of(r), g(first, first + picks_);
    const double h = renormalised_ ? 0 : d_entropy_[r];
    const double sum = std::accumulate(g.begin(), g.end(), 0.0);
    const DistillationReference forward = wanted(r);
    if (std::isnan(forward.student[0])) {  // an empty distribution has no gradient
      ExpectedRow want{std::vector<double>(row.size(), 0), std::vector<double>(row.size(), 1)};
      want.undefined = std::ranges::any_of(g, [](double x) { return x != 0; });
      if (want.undefined)
        for (const int32_t id : ids_of(r)) want.values[id] = std::nan("");
      return want;
    }
    RowGradientTerms terms{log_softmax_reference(row)};
    terms.a = -(sum + h * forward.entropy);
    terms.b = -h;
    terms.ids = ids_of(r);
    std::vector<double> weights = g;
    if (renormalised_) {  // only the ids have a gradient: g_k - p_k Σ g
      terms.a = 0;
      for (size_t k = 0; k < g.size(); ++k) {
        const double size = std::abs(forward.student[k]);
        if (std::isfinite(size))
          weights[k] = std::abs(g[k]) + std::exp(-size) * std::abs(sum) * (1 + size);
      }
    }
    terms.weights = weights;
    return {distillation_gradient_reference(row, terms.ids, g, h, renormalised_), terms.scales()};
  }

  bool renormalised_;
  int64_t picks_;
  Buffer<float> values_;  // [rows, picks], like the next three
  std::vector<float> d_values_;
  Buffer<float> teacher_logits_, teacher_;
  Buffer<float> entropy_;
  std::vector<float> d_entropy_;
};

std::string distinct_picks(const LogprobsWorkload& problem, const LogprobsOptions&) {
  if (problem.picks <= problem.vocab.vocab_size) return "";
  return fmt::format("a teacher has no {} largest of {} logits; the most are {}", problem.picks,
                     problem.vocab.vocab_size, problem.vocab.vocab_size);
}

LogprobsOperation distillation_family(const char* name, const char* summary, bool renormalised) {
  std::vector<LogprobsArray> arrays{{"distilled_logprob", "TK"},
                                    {"distilled_teacher_logprob", "TK", false, {"teacher_values"}},
                                    {"distilled_entropy", "T"},
                                    {"d_distilled", "TV", false, gradient_inputs()}};
  if (renormalised)
    arrays = {{"distilled_renormalised_logprob", "TK"},
              {"distilled_renormalised_teacher_logprob", "TK", false, {"teacher_values"}},
              {"d_distilled_renormalised", "TV", false, gradient_inputs()}};
  return {.name = name,
          .summary = summary,
          .definition = "distillation_reference, distillation_gradient_reference",
          .methods = {{"gyre", makes<DistillationOp>(renormalised), 0, distinct_picks}},
          .backward = renormalised ? RowTraffic::writes : RowTraffic::updates,
          .needs = {{"ids"}, {"teacher", "teacher_values"}},
          .arrays = std::move(arrays)};
}

}  // namespace

LogprobsOperation distill_operation() {
  return distillation_family("distill", "log-probabilities of a teacher's --picks ids, and entropy",
                             false);
}

LogprobsOperation distill_renormalised_operation() {
  return distillation_family("distill-renormalised", "the same over those ids alone", true);
}

}  // namespace gyre
