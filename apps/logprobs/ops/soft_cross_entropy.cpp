// soft-ce: cross entropy with a teacher's distribution.
//
// References: soft_cross_entropy_reference and soft_cross_entropy_gradient_reference. Forward does
// one all-gather of 20 bytes per row; backward sends nothing. NeMo RL does five all-reduces of 4
// bytes per row.

#include "apps/logprobs/operation.hpp"
#include "baselines/upstream.hpp"
#include "core/special_values.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_parallel.hpp"

namespace gyre {
namespace {

class SoftCrossEntropyOp : public RowsOp {
 public:
  explicit SoftCrossEntropyOp(LogprobsContext& context)
      : RowsOp(context),
        teacher_(rows_.teacher()),
        values_(rows_.rows()),
        d_values_(rows_.gradients(0)) {}

  void start() override {
    auto ours = std::make_shared<SoftCrossEntropy>(rows_.rows(), vocab(), c_.options.threads, tp(),
                                                   kernels(), &tp_arrays());
    forward_ = [this, ours] { ours->forward(rows_.logits(), teacher_, stream(), values_.span()); };
    backward_ = [this, ours] {
      ours->backward(rows_.logits(), teacher_, d_values_, rows_.d_logits());
    };
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (pass == Pass::backward) return SentTraffic{};
    return all_gather_of(tp(), 20 * rows_.rows());
  }
  double ideal_bytes(Pass pass) const override {
    if (pass == Pass::forward) return 2 * shard_bytes(rows_.rows());
    return shard_bytes(rows_.rows()) + 2 * shard_bytes(active_rows());
  }

 protected:
  std::vector<std::span<float>> outputs() override { return {values_.span()}; }

  MatrixRef teacher_;
  Buffer<float> values_;
  std::vector<float> d_values_;

 private:
  bool has_gradient(int64_t r) const override { return d_values_[r] != 0; }
  std::vector<double> teacher_of(int64_t r) const {
    return whole_row(token(r), TokenTensor::teacher);
  }
  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::backward)
      return {
          row_gradient("d_soft_cross_entropy", [this](size_t r) { return expected_gradient(r); })};
    return {row_values("soft_cross_entropy", "cross entropies", values_.span(), 0,
                       [this](size_t r) { return expected_value(r); })};
  }
  ExpectedRow expected_value(size_t r) const {
    const std::vector<double> student = row_of(r), teacher = teacher_of(r),
                              log_q = log_softmax_reference(student),
                              log_p = log_softmax_reference(teacher);
    ExpectedRow want = scored({soft_cross_entropy_reference(student, teacher)});
    // f32 flushes a p below its smallest normal number to 0; log q may be as large as p is small.
    for (size_t v = 0; v < log_p.size(); ++v)
      if (const double p = std::exp(log_p[v]); p > 0 && p < 0x1p-126 && std::isfinite(log_q[v]))
        want.scales[0] += p * std::abs(log_q[v]) / logprob_tolerance();
    return want;
  }
  ExpectedRow expected_gradient(size_t r) const {
    const double g = d_values_[r];
    const std::vector<double> student = row_of(r), teacher = teacher_of(r),
                              log_q = log_softmax_reference(student),
                              log_p = log_softmax_reference(teacher);
    ExpectedRow want{soft_cross_entropy_gradient_reference(student, teacher, g), {}};
    // g (q - p) has two terms, and each has the error of its own log-probability.
    for (size_t v = 0; v < want.values.size(); ++v)
      want.scales.push_back(logit_gradient_scale(log_q[v], g, 0, 0) +
                            logit_gradient_scale(log_p[v], g, 0, 0));
    return want;
  }
};

/// NeMo RL's algorithm.
class UpstreamSoftCrossEntropyOp final : public SoftCrossEntropyOp {
 public:
  using SoftCrossEntropyOp::SoftCrossEntropyOp;
  void start() override {
    const upstream::Shape shape{rows_.rows(), vocab(), 0, c_.options.threads};
    auto theirs = std::make_shared<upstream::SoftCrossEntropy>(shape, tp());
    forward_ = [this, theirs] {
      theirs->forward(rows_.logits(), teacher_, stream(), values_.span());
    };
    backward_ = [this, theirs] { theirs->backward(d_values_, rows_.d_logits()); };
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (pass == Pass::backward) return SentTraffic{};
    const SentTraffic one = all_reduce_of(tp(), 4 * rows_.rows());
    return SentTraffic{5 * one.messages, 5 * one.bytes};
  }
};

}  // namespace

LogprobsOperation soft_cross_entropy_operation() {
  return {.name = "soft-ce",
          .summary = "cross entropy with a teacher's distribution",
          .definition = "soft_cross_entropy_reference, soft_cross_entropy_gradient_reference",
          .methods = {{"gyre", makes<SoftCrossEntropyOp>()},
                      {"upstream", makes<UpstreamSoftCrossEntropyOp>(), 6}},
          .backward = RowTraffic::updates,
          .matrices = {.always = 1},
          .needs = {{"teacher"}},
          .arrays = {{"soft_cross_entropy", "T", false, {"logits", "teacher"}},
                     {"d_soft_cross_entropy", "TV", false, {"logits", "teacher", "d_value"}}}};
}

}  // namespace gyre
