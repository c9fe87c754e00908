// raw-gather, soft-ce, distill, distill-renormalised.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "apps/logprobs/op.hpp"
#include "baselines/upstream.hpp"
#include "logprobs/distillation.hpp"

namespace gyre {
namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr double unknown = std::numeric_limits<double>::quiet_NaN();

/// What the operations on a token's ids share: gradients [rows, picks] of their results.
class PicksOp : public LogprobsOp {
 public:
  explicit PicksOp(LogprobsContext& context)
      : LogprobsOp(context, false),
        rows_(context.in_order()),
        picks_(context.problem.picks),
        values_(rows_.rows() * picks_),
        d_values_(rows_.rows() * picks_) {
    for (int64_t k = 0; k < picks_; ++k) {
      const std::vector<float> g = rows_.gradients(2 + k);
      for (int64_t r = 0; r < rows_.rows(); ++r)
        d_values_[r * picks_ + k] = g[static_cast<size_t>(r)];
    }
  }
  void prepare_backward() override { rows_.prepare_gradient(); }
  void restore() override { rows_.restore(); }

 protected:
  int64_t token(int64_t r) const { return rows_.tokens()[static_cast<size_t>(r)]; }
  std::span<const int32_t> ids_of(int64_t r) const {
    return rows_.ids().subspan(static_cast<size_t>(r * picks_), static_cast<size_t>(picks_));
  }
  std::vector<double> gradients_of(int64_t r) const {
    const float* first = d_values_.data() + r * picks_;
    return {first, first + picks_};
  }

  LogprobsRows& rows_;
  int64_t picks_;
  Buffer<float> values_, d_values_;  // [rows, picks]
};

class RawGatherOp final : public PicksOp {
 public:
  using PicksOp::PicksOp;
  void start() override {
    auto gathered = std::make_shared<GatheredLogits>(rows_.rows(), vocab(), picks_,
                                                     c_.options.threads, tp(), kernels());
    forward_ = [this, gathered] {
      gathered->forward(rows_.logits(), rows_.ids(), stream(), values_.span());
    };
    backward_ = [this, gathered] {
      gathered->backward(rows_.ids(), d_values_.span(), rows_.d_logits());
    };
  }
  void poison() override {
    std::ranges::fill(values_.span(), not_a_number);
    rows_.poison();
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    return pass == Pass::forward ? all_reduce_of(tp(), 4 * rows_.rows() * picks_) : SentTraffic{};
  }
  double ideal_bytes(Pass pass) const override {
    return pass == Pass::forward ? unknown : shard_bytes(rows_.rows());
  }
  void verify(Pass pass, const std::string& label, Verification& checks) override {
    const bool forward = pass == Pass::forward;
    const double tolerance = forward ? 0 : logit_gradient_tolerance(c_.problem.type);
    Check& check = check_of(label, forward ? "logits" : "d_logits", tolerance, checks);
    for (const int64_t r : sample(rows_.tokens())) {
      const std::vector<double> row = whole_row(token(r)), g = gradients_of(r);
      std::vector<double> want(row.size(), 0);
      for (int64_t k = 0; k < picks_; ++k) {
        const auto id = static_cast<size_t>(ids_of(r)[static_cast<size_t>(k)]);
        want[id] += g[static_cast<size_t>(k)];
        if (forward)
          check.add(static_cast<double>(values_[r * picks_ + k]), row[id],
                    [&] { return fmt::format("token {} id {}", token(r), id); });
      }
      if (forward) continue;
      const RowGradientTerms terms{std::vector<double>(row.size(), -HUGE_VAL), 0, 0, ids_of(r), g};
      add_gradient_row(check, host_row(rows_.d_logits(), r), 0, first_column(), want,
                       terms.scales(), token(r));
    }
    if (forward) check_same_bits(label, values_.span(), tp(), checks);
  }
};

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
      std::ranges::fill(results->span(), not_a_number);
    rows_.poison();
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (pass == Pass::backward) return SentTraffic{};
    if (renormalised_) return all_reduce_of(tp(), 4 * rows_.rows() * picks_);
    return all_gather_of(tp(), 4 * rows_.rows() * (3 + picks_));
  }
  double ideal_bytes(Pass pass) const override {
    const double once = shard_bytes(rows_.rows());
    if (pass == Pass::forward) return renormalised_ ? unknown : once;
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

class SoftCrossEntropyOp final : public LogprobsOp {
 public:
  SoftCrossEntropyOp(LogprobsContext& context, bool upstream)
      : LogprobsOp(context, upstream),
        rows_(context.in_order()),
        teacher_(rows_.teacher()),
        values_(rows_.rows()),
        d_values_(rows_.gradients(0)) {}

  void start() override {
    if (upstream_) {
      const upstream::Shape shape{rows_.rows(), vocab(), 0, c_.options.threads};
      auto theirs = std::make_shared<upstream::SoftCrossEntropy>(shape, tp());
      forward_ = [this, theirs] {
        theirs->forward(rows_.logits(), teacher_, stream(), values_.span());
      };
      backward_ = [this, theirs] { theirs->backward(d_values_, rows_.d_logits()); };
      return;
    }
    auto ours = std::make_shared<SoftCrossEntropy>(rows_.rows(), vocab(), c_.options.threads, tp(),
                                                   kernels());
    forward_ = [this, ours] { ours->forward(rows_.logits(), teacher_, stream(), values_.span()); };
    backward_ = [this, ours] {
      ours->backward(rows_.logits(), teacher_, d_values_, rows_.d_logits());
    };
  }
  void prepare_backward() override { rows_.prepare_gradient(); }
  void restore() override { rows_.restore(); }
  void poison() override {
    std::ranges::fill(values_.span(), not_a_number);
    rows_.poison();
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (pass == Pass::backward) return SentTraffic{};
    if (!upstream_) return all_gather_of(tp(), 20 * rows_.rows());
    const SentTraffic one = all_reduce_of(tp(), 4 * rows_.rows());
    return SentTraffic{5 * one.messages, 5 * one.bytes};
  }
  double ideal_bytes(Pass pass) const override {
    if (pass == Pass::forward) return 2 * shard_bytes(rows_.rows());
    const auto active = std::ranges::count_if(d_values_, [](float g) { return g != 0; });
    return shard_bytes(rows_.rows()) + 2 * shard_bytes(active);
  }
  void verify(Pass pass, const std::string& label, Verification& checks) override {
    const bool forward = pass == Pass::forward;
    const double tolerance =
        forward ? logprob_tolerance() : logit_gradient_tolerance(c_.problem.type);
    Check& check = check_of(label, forward ? "cross entropies" : "d_logits", tolerance, checks);
    for (const int64_t r : sample(rows_.tokens())) {
      const int64_t token = rows_.tokens()[static_cast<size_t>(r)];
      const std::vector<double> student = whole_row(token),
                                teacher = whole_row(token, TokenTensor::teacher);
      if (!forward) {
        verify_gradient(check, r, student, teacher);
        continue;
      }
      const double want = reference() == nullptr
                              ? soft_cross_entropy_reference(student, teacher)
                              : reference()->soft_cross_entropy[static_cast<size_t>(token)];
      check.add(
          static_cast<double>(values_[r]), want, [&] { return fmt::format("token {}", token); },
          logprob_scale(want));
    }
    if (forward) check_same_bits(label, values_.span(), tp(), checks);
  }

 private:
  void verify_gradient(Check& check, int64_t r, std::span<const double> student,
                       std::span<const double> teacher) {
    const int64_t token = rows_.tokens()[static_cast<size_t>(r)];
    const auto g = static_cast<double>(d_values_[static_cast<size_t>(r)]);
    const std::vector<double> log_q = log_softmax_reference(student),
                              log_p = log_softmax_reference(teacher);
    std::vector<double> want = soft_cross_entropy_gradient_reference(student, teacher, g), scales;
    if (reference() != nullptr)
      std::copy_n(reference()->d_soft_cross_entropy.begin() + token * std::ssize(want), want.size(),
                  want.begin());
    // g (q - p): made of two terms, each with the error of its own log-probability.
    for (size_t v = 0; v < want.size(); ++v)
      scales.push_back(logit_gradient_scale(log_q[v], g, 0, 0) +
                       logit_gradient_scale(log_p[v], g, 0, 0));
    add_gradient_row(check, host_row(rows_.d_logits(), r), 0, first_column(), want, scales, token);
  }

  LogprobsRows& rows_;
  MatrixRef teacher_;
  Buffer<float> values_;
  std::vector<float> d_values_;
};

}  // namespace

std::unique_ptr<LogprobsOp> make_soft_ce_op(LogprobsContext& context, const std::string&,
                                            bool upstream) {
  return std::make_unique<SoftCrossEntropyOp>(context, upstream);
}

std::unique_ptr<LogprobsOp> make_raw_gather_op(LogprobsContext& context, const std::string&, bool) {
  return std::make_unique<RawGatherOp>(context);
}

std::unique_ptr<LogprobsOp> make_distillation_op(LogprobsContext& context, const std::string& name,
                                                 bool) {
  return std::make_unique<DistillationOp>(context, name == "distill-renormalised");
}

}  // namespace gyre
