// top-k, argmax: the largest logits of each row and their ids.
//
// Results must equal top_k_reference bitwise. A call does one all-gather of a value in the logits'
// type and a 4-byte id per entry. NeMo RL does two per slice of rows, of 12 bytes per entry.

#include <algorithm>

#include "apps/logprobs/operation.hpp"
#include "baselines/upstream.hpp"
#include "core/special_values.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_top_k.hpp"

namespace gyre {
namespace {

class TopKOp : public RowsOp {
 public:
  TopKOp(LogprobsContext& context, bool argmax)
      : RowsOp(context),
        argmax_(argmax),
        k_(argmax ? 1 : context.problem.top),
        length_(std::min(k_, vocab().vocab_size)),
        values_(rows_.rows() * length_),
        ids_(rows_.rows() * length_) {}

  void start() override {
    auto ours =
        std::make_shared<VocabTopK>(rows_.rows(), vocab(), k_, c_.options.threads, tp(), kernels());
    forward_ = [this, ours] { ours->run(rows_.logits(), stream(), values_.span(), ids_.span()); };
  }
  void prepare_backward() override {}
  void restore() override {}
  void poison() override {
    std::ranges::fill(values_.span(), nan_of<float>);
    std::ranges::fill(ids_.span(), -2);
  }
  std::optional<SentTraffic> expected(Pass) const override {
    const int64_t value_bytes = size_of(c_.problem.type);
    return all_gather_of(tp(), round_up(entries() * (4 + value_bytes), 4));
  }

 protected:
  std::vector<std::span<float>> outputs() override { return {values_.span()}; }
  /// Number of entries that each rank sends.
  int64_t entries() const {
    int64_t longest = 0;
    for (int r = 0; r < vocab().ranks(); ++r) longest = std::max(longest, vocab().valid(r));
    return rows_.rows() * std::min(k_, longest);
  }

  bool argmax_;
  int64_t k_, length_;
  Buffer<float> values_;
  Buffer<int32_t> ids_;

 private:
  std::vector<ResultArray> results(Pass) override {
    ResultArray values = shared_array<float>(argmax_ ? "argmax_value" : "top_values", "values", 0,
                                             rows_.tokens(), values_.span(), argmax_ ? 0 : length_);
    ResultArray ids = shared_array<int32_t>(argmax_ ? "argmax_id" : "top_ids", "ids", 0,
                                            rows_.tokens(), ids_.span(), argmax_ ? 0 : length_);
    values.expect = expect_rows([this](size_t r) { return expected(r, &TopEntry::value); });
    ids.expect = expect_rows([this](size_t r) { return expected(r, &TopEntry::id); });
    if (takes_any_of_ties())
      ids.is_as_right = [this](size_t r, int64_t, double got, double want) {
        return is_of_equal_logit(r, got, want);
      };
    return {values, ids};
  }
  template <class Member>
  ExpectedRow expected(size_t r, Member member) const {
    ExpectedRow want;
    for (const TopEntry& entry : top_k_reference(row_of(r), k_))
      want.values.push_back(entry.*member);
    want.scales.assign(want.values.size(), 1);
    return want;
  }
  /// Whether the two ids have equal logits and each occurs exactly once in its own list.
  bool is_of_equal_logit(size_t r, double got, double want) const {
    const std::vector<double> row = row_of(r);
    const auto valid = [&](double id) { return id >= 0 && id < static_cast<double>(row.size()); };
    const size_t length = length_;
    const auto own = ids_.span().subspan(r * length, length);
    const std::vector<double>* answers = c_.inputs.answers(argmax_ ? "argmax_id" : "top_ids");
    const size_t first = static_cast<size_t>(rows_.tokens()[r]) * length;
    if (answers != nullptr &&
        std::ranges::count(std::span(*answers).subspan(first, length), want) != 1)
      return false;
    return valid(got) && valid(want) && row[got] == row[want] &&
           std::ranges::count(own, static_cast<int32_t>(got)) == 1;
  }
};

/// NeMo RL's algorithm.
class UpstreamTopKOp final : public TopKOp {
 public:
  using TopKOp::TopKOp;
  void start() override {
    const upstream::Shape shape{rows_.rows(), vocab(), c_.options.chunk, c_.options.threads};
    auto theirs = std::make_shared<upstream::TopK>(shape, k_, tp());
    forward_ = [this, theirs] {
      theirs->run(rows_.logits(), stream(), values_.span(), ids_.span());
    };
  }
  std::optional<SentTraffic> expected(Pass) const override {
    const int64_t chunk = c_.options.chunk > 0 ? c_.options.chunk : rows_.rows();
    const int64_t slices = rows_.rows() == 0 ? 0 : ceil_div(rows_.rows(), chunk);
    const SentTraffic all = all_gather_of(tp(), 12 * entries());
    return SentTraffic{2 * slices * all.messages, all.bytes};
  }
};

}  // namespace

LogprobsOperation top_k_operation() {
  return {
      .name = "top-k",
      .summary = "the --picks largest logits and their ids",
      .definition = "top_k_reference",
      .methods = {{"gyre", makes<TopKOp>(false)}, {"upstream", makes<UpstreamTopKOp>(false), 2}},
      .arrays = {{"top_values", "TL"}, {"top_ids", "TL", true}}};
}

LogprobsOperation argmax_operation() {
  return {.name = "argmax",
          .summary = "the largest logit and its id",
          .definition = "top_k_reference",
          .methods = {{"gyre", makes<TopKOp>(true)}},
          .arrays = {{"argmax_value", "T"}, {"argmax_id", "T", true}}};
}

}  // namespace gyre
