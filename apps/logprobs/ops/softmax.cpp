// log-softmax, softmax: log-probabilities or probabilities of all ids, where the logits are.
//
// Defined by log_softmax_reference. A call is one all-gather of 8 bytes a row.

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "apps/logprobs/operation.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_parallel.hpp"

namespace gyre {
namespace {

class SoftmaxOp final : public LogprobsOp {
 public:
  SoftmaxOp(LogprobsContext& context, bool exponentiate)
      : LogprobsOp(context, false),
        exponentiate_(exponentiate),
        rows_(context.in_order()),
        out_(rows_.rows(), columns(), context.problem.type, space()) {}

  void start() override {
    const ScoreOptions options{0, false, temperature(), c_.options.threads, kernels()};
    scores_ = std::make_unique<VocabScores>(rows_.rows(), vocab(), options, tp());
    forward_ = [this] {
      scores_->forward(rows_.logits(), {}, stream(), {}, {});
      scores_->write_log_softmax(rows_.logits(), exponentiate_, out_.ref());
    };
  }
  void poison() override { out_.poison(stream()); }
  std::optional<SentTraffic> expected(Pass) const override {
    return all_gather_of(tp(), 8 * rows_.rows());
  }
  /// Two reads: no row is known before all ranks have read their part of it.
  double ideal_bytes(Pass) const override { return 3 * shard_bytes(rows_.rows()); }

  void verify(Pass, const std::string& label, Verification& checks) override {
    Check& check = check_of(label, "values", tolerance(), checks);
    for (const int64_t r : sample(rows_.tokens())) {
      const int64_t token = rows_.tokens()[static_cast<size_t>(r)];
      std::vector<double> want = log_softmax_reference(whole_row(token), temperature()), scales;
      for (double& logprob : want) {
        scales.push_back(scale(logprob));
        if (exponentiate_) logprob = std::exp(logprob);
      }
      const ConstMatrixRef got = host_row(out_.ref(), r);
      for (int64_t c = 0; c < columns(); ++c) {
        const bool padding = c >= valid_columns();
        const auto id = static_cast<size_t>(first_column() + c);
        const double nothing = exponentiate_ ? 0 : -std::numeric_limits<double>::infinity();
        check.add(
            static_cast<double>(got.at(0, c)), padding ? nothing : want[id],
            [&] { return fmt::format("token {} column {}", token, id); }, padding ? 1 : scales[id]);
      }
    }
  }

 private:
  double temperature() const { return c_.problem.filter.temperature; }
  /// Values are stored in the logits' type: one rounding more.
  double tolerance() const {
    return c_.problem.type == DType::bf16 ? logit_gradient_tolerance(DType::bf16)
                                          : logprob_tolerance();
  }
  /// An error of log p is a relative one of p.
  double scale(double logprob) const {
    if (!exponentiate_) return std::isfinite(logprob) ? logprob_scale(logprob) : 1;
    return logit_gradient_scale(logprob, 1, 0, 0);
  }

  bool exponentiate_;
  LogprobsRows& rows_;
  LogitMatrix out_;
  std::unique_ptr<VocabScores> scores_;
};

LogprobsOperation softmax_family(const char* name, const char* summary, bool exponentiate) {
  return {.name = name,
          .summary = summary,
          .definition = "log_softmax_reference",
          .forward = RowTraffic::copies,
          .matrices = {.always = 1},
          .make = [exponentiate](LogprobsContext& context, bool) {
            return std::make_unique<SoftmaxOp>(context, exponentiate);
          }};
}

}  // namespace

LogprobsOperation log_softmax_operation() {
  return softmax_family("log-softmax", "log-probabilities of all ids, where the logits are", false);
}

LogprobsOperation softmax_operation() {
  return softmax_family("softmax", "probabilities of all ids, where the logits are", true);
}

}  // namespace gyre
