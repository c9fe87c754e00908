// soft-ce: cross entropy with a teacher's distribution.
//
// Defined by soft_cross_entropy_reference and soft_cross_entropy_gradient_reference. A forward call
// is one all-gather of 20 bytes a row; backward sends nothing. NeMo RL's: five all-reduces of 4
// bytes a row.

#include <fmt/format.h>

#include <algorithm>

#include "apps/logprobs/operation.hpp"
#include "baselines/upstream.hpp"
#include "core/special_values.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_parallel.hpp"

namespace gyre {
namespace {

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
    std::ranges::fill(values_.span(), nan_of<float>);
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

LogprobsOperation soft_cross_entropy_operation() {
  return {.name = "soft-ce",
          .summary = "cross entropy with a teacher's distribution",
          .definition = "soft_cross_entropy_reference, soft_cross_entropy_gradient_reference",
          .upstream = true,
          .backward = RowTraffic::updates,
          .matrices = {.always = 1, .upstream = 6},
          .make = [](LogprobsContext& context, bool upstream) {
            return std::make_unique<SoftCrossEntropyOp>(context, upstream);
          }};
}

}  // namespace gyre
