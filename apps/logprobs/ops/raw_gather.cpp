// raw-gather: logits of --picks ids a token.
//
// Defined by the logits themselves; the gradient puts that of each id where it is. A forward call
// is one all-reduce of 4 bytes an id; backward sends nothing.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "apps/logprobs/operation.hpp"
#include "apps/logprobs/ops/picks.hpp"
#include "core/special_values.hpp"
#include "logprobs/vocab_parallel.hpp"

namespace gyre {
namespace {

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
    std::ranges::fill(values_.span(), nan_of<float>);
    rows_.poison();
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    return pass == Pass::forward ? all_reduce_of(tp(), 4 * rows_.rows() * picks_) : SentTraffic{};
  }
  double ideal_bytes(Pass pass) const override {
    return pass == Pass::forward ? nan_of<double> : shard_bytes(rows_.rows());
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

}  // namespace

LogprobsOperation raw_gather_operation() {
  return {.name = "raw-gather",
          .summary = "logits of --picks ids a token",
          .definition = "the logits",
          .backward = RowTraffic::writes,
          .make = [](LogprobsContext& context, bool) {
            return std::make_unique<RawGatherOp>(context);
          }};
}

}  // namespace gyre
