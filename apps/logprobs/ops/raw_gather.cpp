// raw-gather: logits of --picks ids per token.
//
// The reference is the logits themselves. Backward adds each id's gradient to the id's column.
// Forward does one all-reduce of 4 bytes per id; backward sends nothing.

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
  std::optional<SentTraffic> expected(Pass pass) const override {
    return pass == Pass::forward ? all_reduce_of(tp(), 4 * rows_.rows() * picks_) : SentTraffic{};
  }
  double ideal_bytes(Pass pass) const override {
    return pass == Pass::forward ? nan_of<double> : shard_bytes(rows_.rows());
  }

 private:
  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::forward) {
      ResultArray values = shared_array<float>("gathered_logits", "logits", 0, rows_.tokens(),
                                               values_.span(), picks_);
      values.expect = expect_rows([this](size_t r) {
        const std::vector<double> row = row_of(r);
        ExpectedRow want{{}, std::vector<double>(picks_, 1)};
        for (const int32_t id : ids_of(r)) want.values.push_back(row[id]);
        return want;
      });
      return {values};
    }
    ResultArray gradient = gradient_array("d_gathered_logits", rows_.tokens(), rows_.d_logits());
    gradient.expect = expect_rows([this](size_t r) {
      const auto ids = ids_of(r);
      const std::vector<double> g = gradients_of(r);
      const size_t columns = vocab().vocab_size;
      const RowGradientTerms terms{std::vector<double>(columns, -HUGE_VAL), 0, 0, ids, g};
      ExpectedRow want{std::vector<double>(columns, 0), terms.scales()};
      for (size_t k = 0; k < ids.size(); ++k) want.values[ids[k]] += g[k];
      return want;
    });
    return {gradient};
  }
};

}  // namespace

LogprobsOperation raw_gather_operation() {
  return {.name = "raw-gather",
          .summary = "logits of --picks ids a token",
          .definition = "the logits",
          .methods = {{"gyre", makes<RawGatherOp>()}},
          .backward = RowTraffic::writes,
          .needs = {.ids = true},
          .arrays = {{"gathered_logits", LogprobsShape::picks},
                     {"d_gathered_logits", LogprobsShape::vocab, false, {"d_value"}}}};
}

}  // namespace gyre
