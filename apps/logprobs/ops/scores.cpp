// log-softmax, softmax; logprob, entropy, logprob-entropy, gather.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "apps/logprobs/op.hpp"
#include "baselines/upstream.hpp"
#include "logprobs/vocab_parallel.hpp"

namespace gyre {
namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

class SoftmaxOp final : public LogprobsOp {
 public:
  SoftmaxOp(LogprobsContext& context, bool exponentiate)
      : LogprobsOp(context, false),
        exponentiate_(exponentiate),
        rows_(context.in_order()),
        out_(rows_.rows(), columns(), context.problem.type, space()) {}

  void start() override {
    const ScoreOptions options{0, false, temperature(), c_.options.threads, kernels()};
    scores_ = std::make_unique<VocabScores>(rows_.rows(), vocab(), options, tp());
    forward_ = [this] {
      scores_->forward(rows_.logits(), {}, stream(), {}, {});
      scores_->write_log_softmax(rows_.logits(), exponentiate_, out_.ref());
    };
  }
  void poison() override { out_.poison(stream()); }
  std::optional<SentTraffic> expected(Pass) const override {
    return all_gather_of(tp(), 8 * rows_.rows());
  }
  /// Two reads: no row is known before all ranks have read their part of it.
  double ideal_bytes(Pass) const override { return 3 * shard_bytes(rows_.rows()); }

  void verify(Pass, const std::string& label, Verification& checks) override {
    Check& check = check_of(label, "values", tolerance(), checks);
    for (const int64_t r : sample(rows_.tokens())) {
      const int64_t token = rows_.tokens()[static_cast<size_t>(r)];
      std::vector<double> want = log_softmax_reference(whole_row(token), temperature()), scales;
      for (double& logprob : want) {
        scales.push_back(scale(logprob));
        if (exponentiate_) logprob = std::exp(logprob);
      }
      const ConstMatrixRef got = host_row(out_.ref(), r);
      for (int64_t c = 0; c < columns(); ++c) {
        const bool padding = c >= valid_columns();
        const auto id = static_cast<size_t>(first_column() + c);
        const double nothing = exponentiate_ ? 0 : -std::numeric_limits<double>::infinity();
        check.add(
            static_cast<double>(got.at(0, c)), padding ? nothing : want[id],
            [&] { return fmt::format("token {} column {}", token, id); }, padding ? 1 : scales[id]);
      }
    }
  }

 private:
  double temperature() const { return c_.problem.filter.temperature; }
  /// Values are stored in the logits' type: one rounding more.
  double tolerance() const {
    return c_.problem.type == DType::bf16 ? logit_gradient_tolerance(DType::bf16)
                                          : logprob_tolerance();
  }
  /// An error of log p is a relative one of p.
  double scale(double logprob) const {
    if (!exponentiate_) return std::isfinite(logprob) ? logprob_scale(logprob) : 1;
    return logit_gradient_scale(logprob, 1, 0, 0);
  }

  bool exponentiate_;
  LogprobsRows& rows_;
  LogitMatrix out_;
  std::unique_ptr<VocabScores> scores_;
};

class ScoreOp final : public LogprobsOp {
 public:
  ScoreOp(LogprobsContext& context, const std::string& name, bool upstream)
      : LogprobsOp(context, upstream),
        rows_(context.in_order()),
        gathers_(name == "gather"),
        picks_(gathers_            ? context.problem.picks
               : name == "entropy" ? 0
                                   : 1),
        entropy_(name == "entropy" || name == "logprob-entropy"),
        ids_(gathers_      ? rows_.ids()
             : picks_ == 1 ? rows_.targets()
                           : std::span<const int32_t>()),
        logprob_(rows_.rows() * picks_),
        entropies_(entropy_ ? rows_.rows() : 0),
        d_logprob_(rows_.rows() * picks_) {
    for (int64_t k = 0; k < picks_; ++k) {
      const std::vector<float> g = rows_.gradients(gathers_ ? 2 + k : 0);
      for (int64_t r = 0; r < rows_.rows(); ++r)
        d_logprob_[r * picks_ + k] = g[static_cast<size_t>(r)];
    }
    if (entropy_) d_entropy_ = rows_.gradients(1);
  }

  void start() override {
    if (upstream_)
      start_upstream();
    else
      start_ours();
  }
  void prepare_backward() override { rows_.prepare_gradient(); }
  void restore() override { rows_.restore(); }
  void poison() override {
    std::ranges::fill(logprob_.span(), not_a_number);
    std::ranges::fill(entropies_.span(), not_a_number);
    rows_.poison();
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (upstream_) return expected_upstream(pass);
    if (pass == Pass::backward) return SentTraffic{};
    return all_gather_of(tp(), 4 * (2 + picks_ + (entropy_ ? 1 : 0)) * rows_.rows());
  }
  double ideal_bytes(Pass pass) const override {
    if (pass == Pass::forward) return shard_bytes(rows_.rows());
    int64_t active = 0;
    for (int64_t r = 0; r < rows_.rows(); ++r) active += has_gradient(r) ? 1 : 0;
    return shard_bytes(rows_.rows()) + shard_bytes(active);
  }
  void collect(LogprobsOutput& output) const override {
    if (picks_ != 1 || !entropy_) return;
    output.logprob.assign(logprob_.span().begin(), logprob_.span().end());
    output.entropy.assign(entropies_.span().begin(), entropies_.span().end());
  }
  void verify(Pass pass, const std::string& label, Verification& checks) override {
    if (pass == Pass::backward) return verify_gradients(label, checks);
    Check* scores =
        picks_ > 0 ? &check_of(label, "log-probabilities", logprob_tolerance(), checks) : nullptr;
    Check* entropies =
        entropy_ ? &check_of(label, "entropies", logprob_tolerance(), checks) : nullptr;
    for (const int64_t r : sample(rows_.tokens())) verify_row(r, scores, entropies);
    check_same_bits(label, logprob_.span(), tp(), checks);
    if (entropy_) check_same_bits(label, entropies_.span(), tp(), checks);
  }

 private:
  void start_ours() {
    const ScoreOptions options{picks_, entropy_, temperature(), c_.options.threads, kernels()};
    auto scores = std::make_shared<VocabScores>(rows_.rows(), vocab(), options, tp());
    forward_ = [this, scores] {
      scores->forward(rows_.logits(), ids_, stream(), logprob_.span(), entropies_.span());
    };
    backward_ = [this, scores] {
      scores->backward(rows_.logits(), ids_, d_logprob_.span(), d_entropy_, rows_.d_logits());
    };
  }
  void start_upstream() {
    const upstream::Shape shape{rows_.rows(), vocab(), c_.options.chunk, c_.options.threads};
    if (entropy_) {
      auto theirs = std::make_shared<upstream::Entropy>(shape, tp());
      forward_ = [this, theirs] { theirs->forward(rows_.logits(), stream(), entropies_.span()); };
      backward_ = [this, theirs] {
        theirs->backward(rows_.logits(), d_entropy_, stream(), rows_.d_logits());
      };
    } else if (gathers_) {
      start_with_ids(std::make_shared<upstream::GatherLogprob>(shape, picks_, tp()));
    } else {
      start_with_ids(std::make_shared<upstream::Logprob>(shape, tp()));
    }
  }
  template <class Theirs>
  void start_with_ids(std::shared_ptr<Theirs> theirs) {
    forward_ = [this, theirs] { theirs->forward(rows_.logits(), ids_, stream(), logprob_.span()); };
    backward_ = [this, theirs] {
      theirs->backward(rows_.logits(), ids_, d_logprob_.span(), stream(), rows_.d_logits());
    };
  }
  /// Two all-reduces of a number a token for a log-softmax, one more for values.
  SentTraffic expected_upstream(Pass pass) const {
    const int64_t rows = rows_.rows(), chunk = c_.options.chunk;
    const bool recomputes = gathers_ || entropy_ || chunk > 0;
    if (pass == Pass::backward && !recomputes) return {};
    SentTraffic sent;
    const int64_t step = chunk > 0 ? chunk : std::max<int64_t>(rows, 1);
    for (int64_t at = 0; at < rows; at += step) {
      const int64_t n = std::min(step, rows - at);
      std::vector<int64_t> numbers{n, n};
      if (pass == Pass::forward) numbers.push_back(entropy_ ? n : n * picks_);
      if (pass == Pass::backward && entropy_) numbers.push_back(n);
      for (const int64_t count : numbers) {
        const SentTraffic one = all_reduce_of(tp(), 4 * count);
        sent.messages += one.messages;
        sent.bytes += one.bytes;
      }
    }
    return sent;
  }

  double temperature() const { return c_.problem.filter.temperature; }
  std::span<const int32_t> ids_of(int64_t r) const {
    return ids_.subspan(static_cast<size_t>(r * picks_), static_cast<size_t>(picks_));
  }
  bool has_gradient(int64_t r) const {
    for (int64_t k = 0; k < picks_; ++k)
      if (d_logprob_[r * picks_ + k] != 0) return true;
    return entropy_ && d_entropy_[static_cast<size_t>(r)] != 0;
  }
  void verify_row(int64_t r, Check* scores, Check* entropies) const {
    const int64_t token = rows_.tokens()[static_cast<size_t>(r)];
    const auto at = static_cast<size_t>(token);
    const std::vector<double> row = whole_row(token);
    std::vector<double> logprobs;
    if (reference() == nullptr) logprobs = log_softmax_reference(row, temperature());
    for (int64_t k = 0; k < picks_; ++k) {
      const int32_t id = ids_of(r)[static_cast<size_t>(k)];
      double want = 0;  // that of an id that no rank has
      if (reference() == nullptr)
        want = id >= 0 && id < std::ssize(logprobs) ? logprobs[static_cast<size_t>(id)] : 0;
      else if (gathers_)
        want = reference()->gathered[at * static_cast<size_t>(picks_) + static_cast<size_t>(k)];
      else
        want = reference()->logprob[at];
      scores->add(
          static_cast<double>(logprob_[r * picks_ + k]), want,
          [&] { return fmt::format("token {} id {}", token, id); }, logprob_scale(want));
    }
    if (entropies == nullptr) return;
    const double want = reference() == nullptr ? score_row_reference(row, -1, temperature()).entropy
                                               : reference()->entropy[at];
    entropies->add(
        static_cast<double>(entropies_[r]), want, [&] { return fmt::format("token {}", token); },
        entropy_scale(vocab().vocab_size));
  }
  void verify_gradients(const std::string& label, Verification& checks) {
    Check& check = check_of(label, "d_logits", logit_gradient_tolerance(c_.problem.type), checks);
    for (const int64_t r : sample(rows_.tokens())) {
      const int64_t token = rows_.tokens()[static_cast<size_t>(r)];
      const std::vector<double> row = whole_row(token);
      std::vector<double> g, weights;
      for (int64_t k = 0; k < picks_; ++k) {
        g.push_back(static_cast<double>(d_logprob_[r * picks_ + k]));
        weights.push_back(g.back() / temperature());
      }
      const double h = entropy_ ? static_cast<double>(d_entropy_[static_cast<size_t>(r)]) : 0;
      const double entropy = score_row_reference(row, -1, temperature()).entropy;
      RowGradientTerms terms{log_softmax_reference(row, temperature())};
      terms.a = -(std::accumulate(g.begin(), g.end(), 0.0) + h * entropy) / temperature();
      terms.b = -h / temperature();
      terms.ids = ids_of(r);
      terms.weights = weights;
      const std::vector<double> want =
          reference() == nullptr ? score_gradient_reference(row, ids_of(r), g, h, temperature())
                                 : stored_gradient(token);
      add_gradient_row(check, host_row(rows_.d_logits(), r), 0, first_column(), want,
                       terms.scales(), token);
    }
  }
  /// Gradients of both scores add up.
  std::vector<double> stored_gradient(int64_t token) const {
    std::vector<double> sum(static_cast<size_t>(vocab().vocab_size), 0);
    const auto add = [&](const std::vector<double>& all) {
      for (size_t v = 0; v < sum.size(); ++v)
        sum[v] += all[static_cast<size_t>(token) * sum.size() + v];
    };
    if (gathers_) add(reference()->d_gathered);
    if (!gathers_ && picks_ == 1) add(reference()->d_logprob);
    if (entropy_) add(reference()->d_entropy);
    return sum;
  }

  LogprobsRows& rows_;
  bool gathers_;
  int64_t picks_;
  bool entropy_;
  std::span<const int32_t> ids_;
  Buffer<float> logprob_, entropies_, d_logprob_;
  std::vector<float> d_entropy_;
};

}  // namespace

std::unique_ptr<LogprobsOp> make_softmax_op(LogprobsContext& context, const std::string& name,
                                            bool) {
  return std::make_unique<SoftmaxOp>(context, name == "softmax");
}

std::unique_ptr<LogprobsOp> make_score_op(LogprobsContext& context, const std::string& name,
                                          bool upstream) {
  return std::make_unique<ScoreOp>(context, name, upstream);
}

}  // namespace gyre
