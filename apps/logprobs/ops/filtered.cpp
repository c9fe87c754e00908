// filtered: log-probability of each token's target under temperature, top-k and top-p.
//
// References: filtered_logprob_reference and filtered_gradient_reference. Where rounding decides
// how many ids survive, they keep as many as the result did (SurvivorsReference). Forward does one
// all-gather of 16 bytes per row plus the lists of the largest logits. Rows whose threshold is in
// no list need extra rounds that depend on the logits. Backward sends nothing. NeMo RL does an f32
// all-to-all of all logits in both directions, and an all-gather of 4 bytes per row.

#include <fmt/format.h>

#include "apps/logprobs/operation.hpp"
#include "apps/logprobs/ops/filtered_row.hpp"
#include "baselines/upstream.hpp"
#include "core/special_values.hpp"
#include "logprobs/filtered_scores.hpp"

namespace gyre {
namespace {

constexpr const char* filtered_values = "filtered_logprob";
constexpr const char* filtered_gradient = "d_filtered_logprob";

class FilteredOp : public RowsOp {
 public:
  explicit FilteredOp(LogprobsContext& context)
      : RowsOp(context), logprob_(rows_.rows()), d_logprob_(rows_.gradients(0)) {}

  void start() override {
    const RowFilters filters(c_, rows_.tokens());
    list_bytes_ = filters.list_bytes();
    auto ours = std::make_shared<FilteredScores>(rows_.rows(), vocab(), c_.problem.type,
                                                 filters.options(kernels()), tp());
    forward_ = [this, ours] {
      ours->forward(rows_.logits(), rows_.targets(), stream(), logprob_.span());
      by_digits_ = ours->rows_by_digits();
    };
    backward_ = [this, ours] {
      ours->backward(rows_.logits(), rows_.targets(), d_logprob_, rows_.d_logits());
    };
    survivors_ = [ours] {
      return std::vector<int32_t>(ours->survivors().begin(), ours->survivors().end());
    };
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (pass == Pass::backward) return SentTraffic{};
    if (by_digits_ > 0) return std::nullopt;
    return all_gather_of(tp(), round_up(rows_.rows() * (16 + list_bytes_), 4));
  }
  std::string note() const override {
    return by_digits_ == 0 ? "" : fmt::format("{} rows by digits", by_digits_);
  }
  void verify(Pass pass, Verification& checks) override {
    kept_ = survivors_();
    RowsOp::verify(pass, checks);
    if (pass == Pass::backward || c_.grid.tp_rank() != 0) return;
    compare_survivors(
        sample_of(rows_.tokens(), sample_rows()), rows_.tokens(), kept_, logprob_.span(),
        takes_any_of_ties(), [this](size_t r) { return filtered_row(r); },
        check_of(label(pass), "survivors", logprob_tolerance(), c_.problem.tokens(), checks));
  }

 protected:
  std::vector<std::span<float>> outputs() override { return {logprob_.span()}; }

  Buffer<float> logprob_;
  std::vector<float> d_logprob_;
  std::function<std::vector<int32_t>()> survivors_;  // last forward's counts, [rows]; collective

 private:
  FilteredRow filtered_row(size_t r) const {
    return {row_of(r), filter(token(r)), rows_.targets()[r], d_logprob_[r]};
  }
  FilteredAnswers answers_of(size_t r) const {
    return {answer(filtered_values, rows_.tokens()[r]),
            answer_row(filtered_gradient, rows_.tokens()[r])};
  }
  std::vector<ResultArray> results(Pass pass) override {
    const bool forward = pass == Pass::forward;
    ResultArray array =
        forward ? shared_array<float>(filtered_values, "log-probabilities", logprob_tolerance(),
                                      rows_.tokens(), std::as_const(logprob_).span(), 0)
                : gradient_array(filtered_gradient, rows_.tokens(), rows_.d_logits());
    array.expect = expect_rows([this, forward](size_t r) {
      return forward ? filtered_row(r).score(logprob_[r], answers_of(r))
                     : filtered_row(r).gradient(kept_.at(r), answers_of(r));
    });
    if (!takes_any_of_ties()) return {array};
    array.is_as_right = [this, forward](size_t r, int64_t column, double got, double want) {
      return forward ? filtered_row(r).is_other_survivor(got, want)
                     : (got == 0) != (want == 0) &&
                           filtered_row(r).is_other_gradient(c_.problem.type, column, got, want);
    };
    return {array};
  }
  bool has_gradient(int64_t r) const override { return d_logprob_[r] != 0; }

  int64_t by_digits_ = 0, list_bytes_ = 0;
  std::vector<int32_t> kept_;  // result of survivors_ when verify() ran
};

/// NeMo RL's algorithm.
class UpstreamFilteredOp final : public FilteredOp {
 public:
  using FilteredOp::FilteredOp;
  void start() override {
    const upstream::Shape shape{rows_.rows(), vocab(), 0, c_.options.threads};
    auto theirs = std::make_shared<upstream::FilteredLogprob>(shape, c_.problem.filter, tp());
    forward_ = [this, theirs] {
      theirs->forward(rows_.logits(), rows_.targets(), stream(), logprob_.span());
    };
    backward_ = [this, theirs] {
      theirs->backward(rows_.targets(), d_logprob_, stream(), rows_.d_logits());
    };
    survivors_ = [this, theirs] { return theirs->survivors(stream()); };
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    const SentTraffic rows = exchanged(pass == Pass::forward);
    if (pass == Pass::backward) return rows;
    return rows + all_gather_of(tp(), 4 * dealt(c_.grid.tp_rank()));
  }

 private:
  /// Number of rows that `rank` has after the exchange: contiguous, balanced blocks.
  int64_t dealt(int rank) const {
    return rows_.rows() / tp().size() + (rank < rows_.rows() % tp().size() ? 1 : 0);
  }
  /// Traffic of upstream's all-to-all, which sends f32.
  SentTraffic exchanged(bool columns_for_rows) const {
    SentTraffic sent;
    const int me = c_.grid.tp_rank();
    for (int r = 0; r < tp().size(); ++r) {
      const int64_t block =
          columns_for_rows ? dealt(r) * columns() : dealt(me) * vocab().columns(r);
      if (r == me || block == 0) continue;
      sent += {1, 4 * block};
    }
    return sent;
  }
};

std::string one_plain_filter(const LogprobsWorkload& problem, const LogprobsOptions&) {
  if (problem.per_token()) return "upstream has one temperature and filter for all tokens";
  return problem.filter.min_p > 0 ? "upstream has no min-p" : "";
}

}  // namespace

LogprobsOperation filtered_operation() {
  return {.name = "filtered",
          .summary = "log-probability under temperature, top-k, min-p and top-p",
          .definition = "filtered_logprob_reference, filtered_gradient_reference",
          .methods = {{"gyre", makes<FilteredOp>()},
                      {"upstream", makes<UpstreamFilteredOp>(), 6, one_plain_filter}},
          .backward = RowTraffic::updates,
          .arrays = {{filtered_values, "T"}, {filtered_gradient, "TV", false, gradient_inputs()}}};
}

}  // namespace gyre
