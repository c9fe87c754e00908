// distill, distill-renormalised: a student's log-probabilities of a teacher's --picks ids, over the
// vocabulary (with the entropy) or over those ids alone.
//
// Defined by distillation_reference and distillation_gradient_reference. A forward call is one
// all-gather of 4 (3 + K) bytes a row or, renormalised, one all-reduce of 4 K; backward sends
// nothing.

#include "logprobs/distillation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "apps/logprobs/operation.hpp"
#include "apps/logprobs/ops/picks.hpp"
#include "core/special_values.hpp"
#include "logprobs/reference.hpp"

namespace gyre {
namespace {

class DistillationOp final : public PicksOp {
 public:
  DistillationOp(LogprobsContext& context, bool renormalised)
      : PicksOp(context),
        renormalised_(renormalised),
        teacher_logits_(rows_.rows() * picks_),
        teacher_(rows_.rows() * picks_),
        entropy_(renormalised ? 0 : rows_.rows()) {
    for (int64_t i = 0; i < teacher_logits_.size(); ++i)
      context.inputs.row(TokenTensor::teacher, token(i / picks_),
                         rows_.ids()[static_cast<size_t>(i)], std::span(&teacher_logits_[i], 1));
    if (!renormalised) d_entropy_ = rows_.gradients(1);
  }
  void start() override {
    const DistillationOptions options{picks_, renormalised_, !renormalised_, c_.options.threads,
                                      kernels()};
    auto scores = std::make_shared<DistillationScores>(rows_.rows(), vocab(), options, tp());
    forward_ = [this, scores] {
      scores->forward(rows_.logits(), teacher_logits_.span(), rows_.ids(), stream(), values_.span(),
                      teacher_.span(), entropy_.span());
    };
    backward_ = [this, scores] {
      scores->backward(rows_.logits(), rows_.ids(), d_values_.span(), d_entropy_, rows_.d_logits());
    };
  }
  void poison() override {
    for (Buffer<float>* results : {&values_, &teacher_, &entropy_})
      std::ranges::fill(results->span(), nan_of<float>);
    rows_.poison();
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
  void verify(Pass pass, const std::string& label, Verification& checks) override {
    if (pass == Pass::backward) return verify_gradients(label, checks);
    Check& students = check_of(label, "student", logprob_tolerance(), checks);
    Check& teachers = check_of(label, "teacher", logprob_tolerance(), checks);
    Check* entropies =
        renormalised_ ? nullptr : &check_of(label, "entropies", logprob_tolerance(), checks);
    for (const int64_t r : sample(rows_.tokens())) {
      const DistillationReference want = wanted(r);
      const auto place = [&] { return fmt::format("token {}", token(r)); };
      for (int64_t k = 0; k < picks_; ++k) {
        const double student = want.student[static_cast<size_t>(k)],
                     teacher = want.teacher[static_cast<size_t>(k)];
        add_value(students, values_[r * picks_ + k], student, place, logprob_scale(student));
        add_value(teachers, teacher_[r * picks_ + k], teacher, place, logprob_scale(teacher));
      }
      if (entropies != nullptr)
        entropies->add(static_cast<double>(entropy_[r]), want.entropy, place,
                       entropy_scale(vocab().vocab_size));
    }
    check_same_bits(label, values_.span(), tp(), checks);
  }

 private:
  DistillationReference wanted(int64_t r) const {
    const float* first = teacher_logits_.data() + r * picks_;
    const std::vector<double> teacher(first, first + picks_);
    return distillation_reference(whole_row(token(r)), ids_of(r), teacher, renormalised_);
  }
  void verify_gradients(const std::string& label, Verification& checks) {
    Check& check = check_of(label, "d_logits", logit_gradient_tolerance(c_.problem.type), checks);
    for (const int64_t r : sample(rows_.tokens())) {
      const std::vector<double> row = whole_row(token(r)), g = gradients_of(r);
      const double h = renormalised_ ? 0 : static_cast<double>(d_entropy_[static_cast<size_t>(r)]);
      const double sum = std::accumulate(g.begin(), g.end(), 0.0);
      const DistillationReference forward = wanted(r);
      if (std::isnan(forward.student[0])) {  // a distribution over nothing has no gradient
        check.add_nothing();
        continue;
      }
      RowGradientTerms terms{log_softmax_reference(row)};
      terms.a = -(sum + h * forward.entropy);
      terms.b = -h;
      terms.ids = ids_of(r);
      std::vector<double> weights = g;
      if (renormalised_) {  // all of the gradient is at the ids: g_k - p_k Σ g
        terms.a = 0;
        for (size_t k = 0; k < g.size(); ++k) {
          const double size = std::abs(forward.student[k]);
          if (std::isfinite(size))
            weights[k] = std::abs(g[k]) + std::exp(-size) * std::abs(sum) * (1 + size);
        }
      }
      terms.weights = weights;
      add_gradient_row(check, host_row(rows_.d_logits(), r), 0, first_column(),
                       distillation_gradient_reference(row, ids_of(r), g, h, renormalised_),
                       terms.scales(), token(r));
    }
  }

  bool renormalised_;
  Buffer<float> teacher_logits_, teacher_, entropy_;
  std::vector<float> d_entropy_;
};

std::string distinct_picks(const LogprobsWorkload& problem, const LogprobsOptions&, bool) {
  if (problem.picks <= problem.vocab.vocab_size) return "";
  return fmt::format("a teacher has no {} largest of {} logits; the most are {}", problem.picks,
                     problem.vocab.vocab_size, problem.vocab.vocab_size);
}

LogprobsOperation distillation_family(const char* name, const char* summary, bool renormalised) {
  return {.name = name,
          .summary = summary,
          .definition = "distillation_reference, distillation_gradient_reference",
          .backward = renormalised ? RowTraffic::writes : RowTraffic::updates,
          .make = [renormalised](
                      LogprobsContext& context,
                      bool) { return std::make_unique<DistillationOp>(context, renormalised); },
          .why_not = distinct_picks};
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
