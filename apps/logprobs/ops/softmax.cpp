// log-softmax, softmax: (log-)probabilities of all ids, sharded like the logits.
//
// References: log_softmax_reference and log_softmax_gradient_reference. Each pass does one
// all-gather of 8 bytes per row. The log-softmax backward takes a gradient for every id.

#include <cmath>
#include <limits>

#include "apps/logprobs/operation.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_parallel.hpp"

namespace gyre {
namespace {

class SoftmaxOp final : public RowsOp {
 public:
  SoftmaxOp(LogprobsContext& context, bool exponentiate)
      : RowsOp(context),
        exponentiate_(exponentiate),
        out_(rows_.rows(), columns(), context.problem.output_type, space()) {}

  void start() override {
    scores_ = std::make_unique<VocabScores>(rows_.rows(), vocab(), score_options(rows_.tokens(), 0),
                                            tp());
    forward_ = [this] {
      scores_->forward(rows_.logits(), {}, stream(), {}, {});
      scores_->write_log_softmax(rows_.logits(), exponentiate_, out_.ref());
    };
    if (exponentiate_) return;
    backward_ = [this] {
      scores_->log_softmax_backward(rows_.logits(), rows_.d_logprobs(), stream(), rows_.d_logits());
    };
  }
  void prepare_backward() override {
    RowsOp::prepare_backward();
    rows_.d_logprobs();
  }
  void poison() override {
    out_.poison(stream());
    RowsOp::poison();
  }
  std::optional<SentTraffic> expected(Pass) const override {
    return all_gather_of(tp(), 8 * rows_.rows());
  }
  /// Counts two reads of the logits (forward) or of the gradients (backward): all ranks must read
  /// their part of a row before any of them can compute its results.
  double ideal_bytes(Pass pass) const override {
    const double logits = shard_bytes(rows_.rows());
    const double outputs = logits * size_of(c_.problem.output_type) / element_bytes();
    return pass == Pass::forward ? 2 * logits + outputs : 2 * outputs + 2 * logits;
  }

 private:
  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::forward) return {values()};
    return {
        row_gradient("d_log_softmax", [this](size_t r) { return expected_gradient(token(r)); })};
  }
  ResultArray values() {
    ResultArray array =
        gradient_array(exponentiate_ ? "softmax" : "log_softmax", rows_.tokens(), out_.ref());
    array.check = "values";
    array.tolerance = logprob_tolerance();
    array.rounding = storage_scale(c_.problem.output_type, array.tolerance);
    array.padding = exponentiate_ ? 0 : -std::numeric_limits<double>::infinity();
    array.expect = expect_rows([this](size_t r) {
      ExpectedRow want{log_softmax_reference(row_of(r), temperature(token(r))), {}};
      for (double& logprob : want.values) {
        want.scales.push_back(scale(logprob));
        if (exponentiate_) logprob = std::exp(logprob);
      }
      return want;
    });
    return array;
  }
  ExpectedRow expected_gradient(int64_t token) const {
    const std::vector<double> logits = whole_row(token);
    const double temperature = this->temperature(token);
    std::vector<float> read(logits.size());
    c_.inputs.d_logprobs(token, 0, read);
    const std::vector<double> g(read.begin(), read.end());
    ExpectedRow want{log_softmax_gradient_reference(logits, g, temperature), {}};
    double sizes = 0;  // sum of the magnitudes of the terms
    for (const double x : g) sizes += std::abs(x);
    const std::vector<double> logprobs = log_softmax_reference(logits, temperature);
    for (size_t v = 0; v < g.size(); ++v)
      want.scales.push_back(
          logit_gradient_scale(logprobs[v], sizes / temperature, 0, std::abs(g[v]) / temperature));
    return want;
  }

  /// An absolute error of log p is a relative error of p.
  double scale(double logprob) const {
    if (!exponentiate_) return std::isfinite(logprob) ? logprob_scale(logprob) : 1;
    return logit_gradient_scale(logprob, 1, 0, 0);
  }

  bool exponentiate_;
  LogitMatrix out_;
  std::unique_ptr<VocabScores> scores_;
};

LogprobsOperation softmax_family(const char* name, const char* summary, bool exponentiate) {
  return {.name = name,
          .summary = summary,
          .definition = "log_softmax_reference",
          .methods = {{"gyre", makes<SoftmaxOp>(exponentiate)}},
          .forward = RowTraffic::copies,
          .matrices = {.output = 1},
          .own_options = {f32_output_option},
          .arrays = {{exponentiate ? "softmax" : "log_softmax", "TV"}}};
}

}  // namespace

LogprobsOperation log_softmax_operation() {
  LogprobsOperation operation =
      softmax_family("log-softmax", "log-probabilities of all ids, sharded like the logits", false);
  operation.definition = "log_softmax_reference, log_softmax_gradient_reference";
  operation.backward = RowTraffic::updates;
  operation.matrices.d_output = 1;
  operation.arrays.push_back({"d_log_softmax", "TV", false, {"logits", "d_logprobs"}});
  return operation;
}

LogprobsOperation softmax_operation() {
  return softmax_family("softmax", "probabilities of all ids, sharded like the logits", true);
}

}  // namespace gyre
