// raw-gather: logits of --picks ids per token.
//
// The reference is the logits themselves. Backward adds each id's gradient to the id's column.
// Forward does one all-reduce of 4 bytes per id; backward sends nothing.

#include <cmath>

#include "apps/logprobs/operation.hpp"
#include "core/special_values.hpp"
#include "logprobs/vocab_parallel.hpp"

namespace gyre {
namespace {

class RawGatherOp final : public RowsOp {
 public:
  explicit RawGatherOp(LogprobsContext& context)
      : RowsOp(context),
        picks_(context.problem.picks),
        values_(rows_.rows() * picks_),
        d_values_(rows_.gradients(2, picks_)) {}

  void start() override {
    auto gathered = std::make_shared<GatheredLogits>(rows_.rows(), vocab(), picks_,
                                                     c_.options.threads, tp(), kernels());
    forward_ = [this, gathered] {
      gathered->forward(rows_.logits(), rows_.ids(), stream(), values_.span());
    };
    backward_ = [this, gathered] { gathered->backward(rows_.ids(), d_values_, rows_.d_logits()); };
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    return pass == Pass::forward ? all_reduce_of(tp(), 4 * rows_.rows() * picks_) : SentTraffic{};
  }
  double ideal_bytes(Pass pass) const override {
    return pass == Pass::forward ? nan_of<double> : shard_bytes(rows_.rows());
  }

 private:
  std::vector<std::span<float>> outputs() override { return {values_.span()}; }
  std::span<const int32_t> ids_of(int64_t r) const {
    return rows_.ids().subspan(r * picks_, picks_);
  }
  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::backward)
      return {row_gradient("d_gathered_logits", [this](size_t r) { return expected_gradient(r); })};
    ResultArray values =
        row_values("gathered_logits", "logits", values_.span(), picks_, [this](size_t r) {
          const std::vector<double> row = row_of(r);
          ExpectedRow want{{}, std::vector<double>(picks_, 1)};
          for (const int32_t id : ids_of(r)) want.values.push_back(row[id]);
          return want;
        });
    values.tolerance = 0;
    return {values};
  }
  ExpectedRow expected_gradient(int64_t r) const {
    const auto ids = ids_of(r);
    const std::vector<double> g(d_values_.begin() + r * picks_,
                                d_values_.begin() + (r + 1) * picks_);
    const size_t columns = vocab().vocab_size;
    const RowGradientTerms terms{std::vector<double>(columns, -HUGE_VAL), 0, 0, ids, g};
    ExpectedRow want{std::vector<double>(columns, 0), terms.scales()};
    for (size_t k = 0; k < ids.size(); ++k) want.values[ids[k]] += g[k];
    return want;
  }

  int64_t picks_;
  Buffer<float> values_;
  std::vector<float> d_values_;  // [rows, picks]
};

}  // namespace

LogprobsOperation raw_gather_operation() {
  return {.name = "raw-gather",
          .summary = "logits of --picks ids a token",
          .definition = "the logits",
          .methods = {{"gyre", makes<RawGatherOp>()}},
          .backward = RowTraffic::writes,
          .needs = {{"ids"}},
          .arrays = {{"gathered_logits", "TK"}, {"d_gathered_logits", "TV", false, {"d_value"}}}};
}

}  // namespace gyre
