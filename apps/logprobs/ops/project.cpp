// project: probabilities, projected to the columns of another vocabulary by a sparse matrix of
// weights (a stored one, or one with --picks columns).
//
// References: projected_reference and projected_gradient_reference. Forward does one all-gather of
// 8 bytes per row and one all-reduce of 4 bytes per row and column; backward sends nothing.

#include <algorithm>
#include <cmath>

#include "apps/logprobs/operation.hpp"
#include "logprobs/projected_probabilities.hpp"
#include "logprobs/reference.hpp"

namespace gyre {
namespace {

class ProjectOp final : public RowsOp {
 public:
  explicit ProjectOp(LogprobsContext& context)
      : RowsOp(context),
        projection_(context.inputs.projection()),
        out_(rows_.rows(), width(), DType::f32, space()),
        d_out_(rows_.rows(), width(), DType::f32, space()) {
    fill_rows_of_tokens(
        rows_.tokens(), d_out_.ref(), stream(),
        [&](int64_t token, std::span<float> to) { context.inputs.d_projected(token, to); });
  }

  void start() override {
    const std::vector<double> temperatures = c_.temperatures(rows_.tokens());
    auto projected = std::make_shared<ProjectedProbabilities>(
        rows_.rows(), vocab(), projection_.ref(),
        ProjectionOptions{c_.problem.filter.temperature, c_.options.threads, kernels(),
                          &tp_arrays(), temperatures},
        tp());
    const auto out = out_.ref().as<float>(), d_out = d_out_.ref().as<float>();
    forward_ = [this, projected, out] { projected->forward(rows_.logits(), stream(), out); };
    backward_ = [this, projected, out, d_out] {
      projected->backward(rows_.logits(), out, d_out, rows_.d_logits());
    };
  }
  void poison() override {
    RowsOp::poison();
    out_.poison(stream());
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (pass == Pass::backward) return SentTraffic{};
    return all_gather_of(tp(), 8 * rows_.rows()) + all_reduce_of(tp(), projected_bytes());
  }
  double ideal_bytes(Pass pass) const override {
    const double once = static_cast<double>(projected_bytes());
    return RowsOp::ideal_bytes(pass) + (pass == Pass::forward ? once : 2 * once);
  }
  void verify(Pass pass, Verification& checks) override {
    RowsOp::verify(pass, checks);
    if (pass == Pass::backward) return;
    std::vector<float> here(rows_.rows() * width());
    stream().copy(here.data(), out_.bytes().data(), projected_bytes());
    stream().synchronize();
    check_same_bits(here, tp(), checks);
  }

 private:
  int64_t width() const { return projection_.width; }
  int64_t projected_bytes() const { return 4 * rows_.rows() * width(); }
  bool has_gradient(int64_t r) const override {
    return std::ranges::any_of(gradients_of(r), [](double g) { return g != 0; });
  }
  std::vector<double> gradients_of(int64_t r) const {
    std::vector<float> g(width());
    c_.inputs.d_projected(token(r), g);
    return {g.begin(), g.end()};
  }
  double heat(int64_t r) const { return temperature(token(r)); }
  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::backward)
      return {row_gradient("d_projected_probability",
                           [this](size_t r) { return expected_gradient(r); })};
    ResultArray array = shared_array<float>("projected_probability", "probabilities",
                                            logprob_tolerance(), rows_.tokens(), {}, width());
    array.read =
        read_rows(width(), [this](size_t r, std::span<double> to) { read_row(out_.ref(), r, to); });
    array.expect = expect_rows([this](size_t r) {
      const std::vector<double> row = row_of(r);
      return ExpectedRow{projected_reference(row, projection_.ref(), heat(r)),
                         scales_of(log_softmax_reference(row, heat(r)))};
    });
    return {array};
  }
  /// Error scale of each column: that of log p of the ids with entries in it.
  std::vector<double> scales_of(const std::vector<double>& logprobs) const {
    std::vector<double> scales(width(), logit_gradient_scale(-HUGE_VAL, 0, 0, 0));
    for (size_t v = 0; v < logprobs.size(); ++v)
      for (int64_t e = projection_.offsets[v]; e < projection_.offsets[v + 1]; ++e)
        scales[projection_.columns[e]] +=
            logit_gradient_scale(logprobs[v], projection_.weights[e], 0, 0);
    return scales;
  }
  ExpectedRow expected_gradient(int64_t r) const {
    const std::vector<double> row = row_of(r), g = gradients_of(r);
    const std::vector<double> logprobs = log_softmax_reference(row, heat(r));
    const std::vector<double> scales = scales_of(logprobs);
    double centre = 0;
    for (size_t c = 0; c < g.size(); ++c) centre += std::abs(g[c]) * scales[c];
    ExpectedRow want{projected_gradient_reference(row, projection_.ref(), g, heat(r)), {}};
    for (size_t v = 0; v < row.size(); ++v) {
      double own = 0;
      for (int64_t e = projection_.offsets[v]; e < projection_.offsets[v + 1]; ++e)
        own += std::abs(g[projection_.columns[e]]) * projection_.weights[e];
      want.scales.push_back(logit_gradient_scale(logprobs[v], (own + centre) / heat(r), 0, 0));
    }
    return want;
  }

  SparseMatrix projection_;
  LogitMatrix out_, d_out_;  // [rows, width]
};

}  // namespace

LogprobsOperation project_operation() {
  return {.name = "project",
          .summary = "probabilities, projected to another vocabulary's ids by sparse weights",
          .definition = "projected_reference, projected_gradient_reference",
          .methods = {{"gyre", makes<ProjectOp>()}},
          .backward = RowTraffic::updates,
          .needs = {{"projection_offsets"}},
          .arrays = {{"projected_probability", "TJ", false, {"logits", "projection_weights"}},
                     {"d_projected_probability",
                      "TV",
                      false,
                      {"logits", "projection_weights", "d_projected"}}}};
}

}  // namespace gyre
