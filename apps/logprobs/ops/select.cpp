// top-k, argmax, filtered; exchange.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "apps/logprobs/op.hpp"
#include "baselines/upstream.hpp"
#include "logprobs/filtered_scores.hpp"
#include "logprobs/vocab_exchange.hpp"
#include "logprobs/vocab_top_k.hpp"

namespace gyre {
namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

class TopKOp final : public LogprobsOp {
 public:
  TopKOp(LogprobsContext& context, bool argmax, bool upstream)
      : LogprobsOp(context, upstream),
        rows_(context.in_order()),
        k_(argmax ? 1 : context.problem.picks),
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
    std::ranges::fill(values_.span(), not_a_number);
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
    if (upstream_ || k_ != c_.problem.picks) return;
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
    std::ranges::fill(logprob_.span(), not_a_number);
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
    if (!upstream_) output.filtered_logprob.assign(logprob_.span().begin(), logprob_.span().end());
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

class ExchangeOp final : public LogprobsOp {
 public:
  explicit ExchangeOp(LogprobsContext& context)
      : LogprobsOp(context, false),
        rows_(context.in_order()),
        exchange_(rows_.rows(), vocab(), context.problem.type, tp(), &tp_arrays()),
        by_rows_(exchange_.rows(), vocab().padded(), context.problem.type, space()) {}

  void start() override {
    forward_ = [this] { exchange_.to_sequence(rows_.logits(), stream(), by_rows_.ref()); };
    backward_ = [this] { exchange_.to_vocab(by_rows_.ref(), stream(), rows_.d_logits()); };
  }
  void prepare_backward() override {
    rows_.prepare_gradient();
    rows_.clobber();  // what is to come back must not be there already
  }
  void restore() override { rows_.restore(); }
  void poison() override { by_rows_.poison(stream()); }
  std::optional<SentTraffic> expected(Pass pass) const override {
    SentTraffic sent;
    const int me = c_.grid.tp_rank();
    for (int r = 0; r < tp().size(); ++r) {
      const int64_t end = r + 1 < tp().size() ? exchange_.first_row(r + 1) : rows_.rows();
      const int64_t block = pass == Pass::forward ? (end - exchange_.first_row(r)) * columns()
                                                  : exchange_.rows() * vocab().columns(r);
      if (r == me || block == 0) continue;
      ++sent.messages;
      sent.bytes += block * static_cast<int64_t>(size_of(c_.problem.type));
    }
    return sent;
  }
  double ideal_bytes(Pass) const override {
    return element_bytes() *
           static_cast<double>(rows_.rows() * columns() + exchange_.rows() * vocab().padded());
  }
  void verify(Pass pass, const std::string& label, Verification& checks) override {
    Check& check = check_of(label, "bits of logits", 0, checks);
    const bool forward = pass == Pass::forward;
    const int64_t first = forward ? exchange_.first_row(c_.grid.tp_rank()) : 0;
    const int64_t first_id = forward ? 0 : first_column();
    const MatrixRef got = forward ? by_rows_.ref() : rows_.d_logits();
    const auto tokens =
        rows_.tokens().subspan(static_cast<size_t>(first), static_cast<size_t>(got.rows));
    LogitMatrix want(1, got.cols, got.type);
    for (const int64_t r : sample(tokens)) {
      const auto token = tokens.subspan(static_cast<size_t>(r), 1);
      fill_logits(c_.inputs, TokenTensor::logits, token, first_id, want.ref());
      const ConstMatrixRef row = host_row(got, r);
      for (int64_t c = 0; c < got.cols; ++c)
        check.add(static_cast<double>(bits(row, 0, c)), static_cast<double>(bits(want.ref(), 0, c)),
                  [&] { return fmt::format("token {} column {}", token[0], first_id + c); });
    }
    if (got.rows * got.cols == 0) check.add_nothing();
  }

 private:
  static uint32_t bits(ConstMatrixRef m, int64_t row, int64_t col) {
    return m.type == DType::f32 ? std::bit_cast<uint32_t>(m.as<float>()(row, col))
                                : uint32_t{m.as<bf16>()(row, col).bits};
  }

  LogprobsRows& rows_;
  VocabExchange exchange_;
  LogitMatrix by_rows_;
};

}  // namespace

std::unique_ptr<LogprobsOp> make_top_k_op(LogprobsContext& context, const std::string& name,
                                          bool upstream) {
  return std::make_unique<TopKOp>(context, name == "argmax", upstream);
}

std::unique_ptr<LogprobsOp> make_filtered_op(LogprobsContext& context, const std::string&,
                                             bool upstream) {
  return std::make_unique<FilteredOp>(context, upstream);
}

std::unique_ptr<LogprobsOp> make_exchange_op(LogprobsContext& context, const std::string&, bool) {
  return std::make_unique<ExchangeOp>(context);
}

}  // namespace gyre
