// top-k, argmax: the largest logits of each row and their ids.
//
// Defined by top_k_reference, to the bit. A call is one all-gather of a value of the logits' type
// and an id of 4 bytes for each entry; NeMo RL's: two for each slice of rows, of 12 bytes an entry.

#include <fmt/format.h>

#include <algorithm>

#include "apps/logprobs/operation.hpp"
#include "baselines/upstream.hpp"
#include "core/special_values.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_top_k.hpp"

namespace gyre {
namespace {

class TopKOp final : public LogprobsOp {
 public:
  TopKOp(LogprobsContext& context, int64_t k, bool upstream)
      : LogprobsOp(context, upstream),
        rows_(context.in_order()),
        k_(k),
        length_(std::min(k_, vocab().vocab_size)),
        values_(rows_.rows() * length_),
        ids_(rows_.rows() * length_) {}

  void start() override {
    if (upstream_) {
      const upstream::Shape shape{rows_.rows(), vocab(), c_.options.chunk, c_.options.threads};
      auto theirs = std::make_shared<upstream::TopK>(shape, k_, tp());
      forward_ = [this, theirs] {
        theirs->run(rows_.logits(), stream(), values_.span(), ids_.span());
      };
      return;
    }
    auto ours =
        std::make_shared<VocabTopK>(rows_.rows(), vocab(), k_, c_.options.threads, tp(), kernels());
    forward_ = [this, ours] { ours->run(rows_.logits(), stream(), values_.span(), ids_.span()); };
  }
  void poison() override {
    std::ranges::fill(values_.span(), nan_of<float>);
    std::ranges::fill(ids_.span(), -2);
  }
  std::optional<SentTraffic> expected(Pass) const override {
    int64_t longest = 0;
    for (int r = 0; r < vocab().ranks(); ++r) longest = std::max(longest, vocab().valid(r));
    const int64_t entries = rows_.rows() * std::min(k_, longest);
    const auto value_bytes = static_cast<int64_t>(size_of(c_.problem.type));
    if (!upstream_) return all_gather_of(tp(), round_up(entries * (4 + value_bytes), 4));
    const int64_t chunk = c_.options.chunk > 0 ? c_.options.chunk : rows_.rows();
    const int64_t slices = rows_.rows() == 0 ? 0 : ceil_div(rows_.rows(), chunk);
    const SentTraffic all = all_gather_of(tp(), 12 * entries);
    return SentTraffic{2 * slices * all.messages, all.bytes};
  }
  double ideal_bytes(Pass) const override { return shard_bytes(rows_.rows()); }

  void collect(LogprobsOutput& output) const override {
    output.top_values.assign(values_.span().begin(), values_.span().end());
    output.top_ids.assign(ids_.span().begin(), ids_.span().end());
  }
  void verify(Pass, const std::string& label, Verification& checks) override {
    Check& values = check_of(label, "values", 0, checks);
    Check& ids = check_of(label, "ids", 0, checks);
    for (const int64_t r : sample(rows_.tokens())) {
      const int64_t token = rows_.tokens()[static_cast<size_t>(r)];
      const std::vector<TopEntry> want = wanted(token);
      for (int64_t k = 0; k < length_; ++k) {
        const TopEntry& entry = want[static_cast<size_t>(k)];
        const auto place = [&] { return fmt::format("token {} entry {}", token, k); };
        values.add(static_cast<double>(values_[r * length_ + k]), entry.value, place);
        ids.add(static_cast<double>(ids_[r * length_ + k]), static_cast<double>(entry.id), place);
      }
    }
    check_same_bits(label, values_.span(), tp(), checks);
  }

 private:
  std::vector<TopEntry> wanted(int64_t token) const {
    const int64_t stored = std::min(c_.problem.picks, vocab().vocab_size);
    if (reference() == nullptr) return top_k_reference(whole_row(token), k_);
    std::vector<TopEntry> entries;
    for (int64_t k = 0; k < length_; ++k) {
      const auto at = static_cast<size_t>(token * stored + k);
      entries.push_back({reference()->top_values[at], reference()->top_ids[at]});
    }
    return entries;
  }

  LogprobsRows& rows_;
  int64_t k_, length_;
  Buffer<float> values_;
  Buffer<int32_t> ids_;
};

std::unique_ptr<LogprobsOp> make_top_k(LogprobsContext& context, bool upstream) {
  return std::make_unique<TopKOp>(context, context.problem.picks, upstream);
}

std::unique_ptr<LogprobsOp> make_argmax(LogprobsContext& context, bool upstream) {
  return std::make_unique<TopKOp>(context, 1, upstream);
}

}  // namespace

LogprobsOperation top_k_operation() {
  return {.name = "top-k",
          .summary = "the --picks largest logits and their ids",
          .definition = "top_k_reference",
          .upstream = true,
          .matrices = {.upstream = 2},
          .written = true,
          .make = make_top_k};
}

LogprobsOperation argmax_operation() {
  return {.name = "argmax",
          .summary = "the largest logit and its id",
          .definition = "top_k_reference",
          .make = make_argmax};
}

}  // namespace gyre
