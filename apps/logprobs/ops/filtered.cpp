// filtered: log-probability of each token's target under temperature, top-k and top-p.
//
// Defined by filtered_logprob_reference and filtered_gradient_reference. A forward call is one
// all-gather of 16 bytes a row and of the lists of the largest logits; rows whose threshold no list
// holds cost rounds that depend on the logits. Backward sends nothing. NeMo RL's: an all-to-all of
// all logits in f32 in both directions, and an all-gather of 4 bytes a row.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "apps/logprobs/operation.hpp"
#include "baselines/upstream.hpp"
#include "core/special_values.hpp"
#include "logprobs/filtered_scores.hpp"
#include "logprobs/reference.hpp"

namespace gyre {
namespace {

class FilteredOp final : public LogprobsOp {
 public:
  FilteredOp(LogprobsContext& context, bool upstream)
      : LogprobsOp(context, upstream),
        rows_(context.in_order()),
        logprob_(rows_.rows()),
        d_logprob_(rows_.gradients(0)) {}

  void start() override {
    const SamplingFilter& filter = c_.problem.filter;
    if (upstream_) {
      const upstream::Shape shape{rows_.rows(), vocab(), 0, c_.options.threads};
      auto theirs = std::make_shared<upstream::FilteredLogprob>(shape, filter, tp());
      forward_ = [this, theirs] {
        theirs->forward(rows_.logits(), rows_.targets(), stream(), logprob_.span());
      };
      backward_ = [this, theirs] {
        theirs->backward(rows_.targets(), d_logprob_, stream(), rows_.d_logits());
      };
      return;
    }
    const FilterOptions options{filter, c_.options.list_length, c_.options.threads, kernels()};
    auto ours =
        std::make_shared<FilteredScores>(rows_.rows(), vocab(), c_.problem.type, options, tp());
    forward_ = [this, ours] {
      ours->forward(rows_.logits(), rows_.targets(), stream(), logprob_.span());
      by_digits_ = ours->rows_by_digits();
    };
    backward_ = [this, ours] {
      ours->backward(rows_.logits(), rows_.targets(), d_logprob_, rows_.d_logits());
    };
  }
  void prepare_backward() override { rows_.prepare_gradient(); }
  void restore() override { rows_.restore(); }
  void poison() override {
    std::ranges::fill(logprob_.span(), nan_of<float>);
    rows_.poison();
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (!upstream_) {
      if (pass == Pass::backward) return SentTraffic{};
      if (by_digits_ > 0) return std::nullopt;
      return all_gather_of(tp(), round_up(rows_.rows() * (16 + list_bytes()), 4));
    }
    const SentTraffic rows = exchanged(pass == Pass::forward);
    if (pass == Pass::backward) return rows;
    const SentTraffic scores = all_gather_of(tp(), 4 * dealt(c_.grid.tp_rank()));
    return SentTraffic{rows.messages + scores.messages, rows.bytes + scores.bytes};
  }
  double ideal_bytes(Pass pass) const override {
    if (pass == Pass::forward) return shard_bytes(rows_.rows());
    const auto active = std::ranges::count_if(d_logprob_, [](float g) { return g != 0; });
    return shard_bytes(rows_.rows()) + shard_bytes(active);
  }
  std::string note() const override {
    return by_digits_ == 0 ? "" : fmt::format("{} rows by digits", by_digits_);
  }

  void collect(LogprobsOutput& output) const override {
    output.filtered_logprob.assign(logprob_.span().begin(), logprob_.span().end());
  }
  void verify(Pass pass, const std::string& label, Verification& checks) override {
    const bool forward = pass == Pass::forward;
    const double tolerance =
        forward ? logprob_tolerance() : logit_gradient_tolerance(c_.problem.type);
    Check& check = check_of(label, forward ? "log-probabilities" : "d_logits", tolerance, checks);
    for (const int64_t r : sample(rows_.tokens())) {
      const int64_t token = rows_.tokens()[static_cast<size_t>(r)];
      const std::vector<double> row = whole_row(token);
      const std::vector<double> left = surviving(row);
      if (is_close(row, left))
        check.add_nothing();
      else if (forward)
        verify_score(check, r, row);
      else
        verify_gradient(check, r, row, left);
    }
    if (forward) check_same_bits(label, logprob_.span(), tp(), checks);
  }

 private:
  /// The largest logits of a token: top_k of them, or as many as the options say.
  int64_t list_bytes() const {
    const SamplingFilter& filter = c_.problem.filter;
    int64_t length = filter.top_p != 1 ? c_.options.list_length : 1, longest = 1;
    if (filter.top_k > 0 && filter.top_k < vocab().vocab_size) length = filter.top_k;
    for (int r = 0; r < vocab().ranks(); ++r) longest = std::max(longest, vocab().valid(r));
    return std::min(length, longest) * static_cast<int64_t>(size_of(c_.problem.type));
  }
  /// Rows of the exchange, dealt in order as evenly as they can be.
  int64_t dealt(int rank) const {
    return rows_.rows() / tp().size() + (rank < rows_.rows() % tp().size() ? 1 : 0);
  }
  /// What upstream's all-to-all sends, of f32.
  SentTraffic exchanged(bool columns_for_rows) const {
    SentTraffic sent;
    const int me = c_.grid.tp_rank();
    for (int r = 0; r < tp().size(); ++r) {
      const int64_t block =
          columns_for_rows ? dealt(r) * columns() : dealt(me) * vocab().columns(r);
      if (r == me || block == 0) continue;
      ++sent.messages;
      sent.bytes += 4 * block;
    }
    return sent;
  }
  double temperature() const { return c_.problem.filter.temperature; }
  /// log p of the survivors, -inf for the others.
  std::vector<double> surviving(std::vector<double> row) const {
    const std::vector<bool> kept = filter_reference(row, c_.problem.filter);
    for (size_t v = 0; v < row.size(); ++v)
      if (!kept[v]) row[v] = -HUGE_VAL;
    return log_softmax_reference(row, temperature());
  }
  /// Whether a sum of probabilities is so close to top_p that rounding decides who survives.
  bool is_close(std::span<const double> row, std::span<const double> left) const {
    const SamplingFilter& filter = c_.problem.filter;
    if (filter.top_p == 1) return false;
    SamplingFilter largest = filter;
    largest.top_p = 1;
    const std::vector<bool> candidates = filter_reference(row, largest);
    std::vector<double> before(row.begin(), row.end());
    for (size_t v = 0; v < before.size(); ++v)
      if (!candidates[v]) before[v] = -HUGE_VAL;
    before = log_softmax_reference(before, temperature());
    double kept = 0, least = HUGE_VAL;
    for (size_t v = 0; v < before.size(); ++v) {
      if (!(left[v] > -HUGE_VAL)) continue;
      kept += std::exp(before[v]);
      least = std::min(least, std::exp(before[v]));
    }
    const double margin = logprob_tolerance();
    return std::abs(kept - filter.top_p) < margin || std::abs(kept - least - filter.top_p) < margin;
  }
  void verify_score(Check& check, int64_t r, std::span<const double> row) const {
    const int64_t token = rows_.tokens()[static_cast<size_t>(r)];
    const int32_t id = rows_.targets()[static_cast<size_t>(r)];
    const double want = reference() == nullptr
                            ? filtered_logprob_reference(row, id, c_.problem.filter)
                            : reference()->filtered_logprob[static_cast<size_t>(token)];
    check.add(
        static_cast<double>(logprob_[r]), want,
        [&] { return fmt::format("token {} id {}", token, id); },
        std::isfinite(want) ? logprob_scale(want) : 1);
  }
  void verify_gradient(Check& check, int64_t r, std::span<const double> row,
                       const std::vector<double>& left) {
    const int64_t token = rows_.tokens()[static_cast<size_t>(r)];
    const int32_t id = rows_.targets()[static_cast<size_t>(r)];
    const auto g = static_cast<double>(d_logprob_[static_cast<size_t>(r)]);
    const double weight = g / temperature();
    RowGradientTerms terms{left, -weight, 0, {}, {}};
    if (id >= 0 && id < std::ssize(left) && left[static_cast<size_t>(id)] > -HUGE_VAL) {
      terms.ids = rows_.targets().subspan(static_cast<size_t>(r), 1);
      terms.weights = std::span(&weight, 1);
    }
    std::vector<double> want = filtered_gradient_reference(row, id, c_.problem.filter, g);
    if (reference() != nullptr)
      std::copy_n(reference()->d_filtered_logprob.begin() + token * std::ssize(want), want.size(),
                  want.begin());
    add_gradient_row(check, host_row(rows_.d_logits(), r), 0, first_column(), want, terms.scales(),
                     token);
  }

  LogprobsRows& rows_;
  Buffer<float> logprob_;
  std::vector<float> d_logprob_;
  int64_t by_digits_ = 0;
};

}  // namespace

LogprobsOperation filtered_operation() {
  return {.name = "filtered",
          .summary = "log-probability under temperature, top-k and top-p",
          .definition = "filtered_logprob_reference, filtered_gradient_reference",
          .upstream = true,
          .backward = RowTraffic::updates,
          .matrices = {.upstream = 6},
          .written = true,
          .make = [](LogprobsContext& context, bool upstream) {
            return std::make_unique<FilteredOp>(context, upstream);
          }};
}

}  // namespace gyre
