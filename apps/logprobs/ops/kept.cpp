// kept: log-probability of each token's target among the ids that a sampler kept (a stored set for
// each row).
//
// References: kept_logprob_reference and kept_gradient_reference. Forward reads the logits of the
// ids, and does one all-gather of 12 bytes per row; backward sends nothing.

#include <algorithm>
#include <cmath>

#include "apps/logprobs/operation.hpp"
#include "core/special_values.hpp"
#include "logprobs/kept_scores.hpp"
#include "logprobs/reference.hpp"

namespace gyre {
namespace {

class KeptOp final : public RowsOp {
 public:
  explicit KeptOp(LogprobsContext& context)
      : RowsOp(context), logprob_(rows_.rows()), d_logprob_(rows_.gradients(0)) {
    for (const int64_t token : rows_.tokens()) {
      const std::vector<int32_t> kept = context.inputs.kept(token);
      ids_.insert(ids_.end(), kept.begin(), kept.end());
      offsets_.push_back(std::ssize(ids_));
    }
  }

  void start() override {
    const std::vector<double> temperatures = c_.temperatures(rows_.tokens());
    auto scores = std::make_shared<KeptScores>(
        rows_.rows(), vocab(), KeptIds{offsets_, ids_},
        KeptOptions{c_.problem.filter.temperature, c_.options.threads, kernels(), temperatures},
        tp());
    forward_ = [this, scores] {
      scores->forward(rows_.logits(), rows_.targets(), stream(), logprob_.span());
    };
    backward_ = [this, scores] { scores->backward(rows_.targets(), d_logprob_, rows_.d_logits()); };
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    return pass == Pass::forward ? all_gather_of(tp(), 12 * rows_.rows()) : SentTraffic{};
  }
  double ideal_bytes(Pass pass) const override {
    return pass == Pass::forward ? nan_of<double> : shard_bytes(rows_.rows());
  }

 private:
  std::vector<std::span<float>> outputs() override { return {logprob_.span()}; }
  bool has_gradient(int64_t r) const override { return d_logprob_[r] != 0; }
  std::span<const int32_t> kept(size_t r) const { return KeptIds{offsets_, ids_}.of(r); }
  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::backward)
      return {row_gradient("d_kept_logprob", [this](size_t r) { return expected_gradient(r); })};
    return {row_values("kept_logprob", "log-probabilities", logprob_.span(), 0, [this](size_t r) {
      const double want = kept_logprob_reference(row_of(r), kept(r), rows_.targets()[r], heat(r));
      ExpectedRow row{{want}, {std::isfinite(want) ? logprob_scale(want) : 1}};
      row.undefined = std::isnan(want);
      return row;
    })};
  }
  double heat(size_t r) const { return temperature(token(static_cast<int64_t>(r))); }
  ExpectedRow expected_gradient(size_t r) const {
    const std::vector<double> row = row_of(r);
    const double slope = d_logprob_[r] / heat(r);
    const int32_t target = rows_.targets()[r];
    const auto ids = kept(r);
    std::vector<double> among;
    for (const int32_t id : ids) among.push_back(row[id]);
    if (!ids.empty()) among = log_softmax_reference(among, heat(r));
    RowGradientTerms terms{std::vector<double>(row.size(), -HUGE_VAL), -slope, 0, {}, {}};
    for (size_t i = 0; i < ids.size(); ++i) terms.logprobs[ids[i]] = among[i];
    if (std::ranges::find(ids, target) != ids.end())
      terms.ids = std::span(&target, 1), terms.weights = std::span(&slope, 1);
    ExpectedRow want{kept_gradient_reference(row, ids, target, d_logprob_[r], heat(r)),
                     terms.scales()};
    want.undefined = std::ranges::any_of(want.values, [](double x) { return std::isnan(x); });
    return want;
  }

  std::vector<int64_t> offsets_{0};  // [rows + 1]
  std::vector<int32_t> ids_;
  Buffer<float> logprob_;
  std::vector<float> d_logprob_;
};

}  // namespace

LogprobsOperation kept_operation() {
  return {.name = "kept",
          .summary = "log-probability among the ids that a sampler kept",
          .definition = "kept_logprob_reference, kept_gradient_reference",
          .methods = {{"gyre", makes<KeptOp>()}},
          .backward = RowTraffic::writes,
          .needs = {{"sampling_mask_ids"}},
          .arrays = {{"kept_logprob", "T"}, {"d_kept_logprob", "TV", false, gradient_inputs()}}};
}

}  // namespace gyre
