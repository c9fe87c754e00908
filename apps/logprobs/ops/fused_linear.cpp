// fused-linear: hidden states to log-probabilities and entropies, without logits.
//
// Defined by score_row_reference and log_softmax_reference of the product of hidden states and the
// head's weight, both in double precision, or by the answers of the file. A forward call is an
// exchange of hidden states, a message to every other rank, and one all-gather of 16 bytes a token;
// backward is a message to every other rank, of the gradient of its hidden states in f32.

#include "logprobs/fused_linear.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "apps/logprobs/operation.hpp"
#include "core/dot.hpp"
#include "core/special_values.hpp"
#include "logprobs/fused_linear_cuda.hpp"
#include "logprobs/reference.hpp"

namespace gyre {
namespace {

/// Products of a check, about a second's work: rows of large vocabularies are sampled less.
constexpr int64_t most_products = int64_t{1} << 29;

/// Hidden states and weights are those of the file; otherwise hidden states are normal, and weights
/// so that logits are as large as the options say.
class LinearOp final : public LogprobsOp {
 public:
  explicit LinearOp(LogprobsContext& context)
      : LogprobsOp(context, false),
        hidden_(context.problem.hidden),
        factors_(context.inputs.linear()),
        logit_scale_(factors_ == nullptr ? context.options.logit_scale : factors_->logit_size()),
        weight_scale_(logit_scale_ / std::sqrt(static_cast<double>(hidden_))),
        tokens_(context.tokens_in_order()),
        layer_({count(), hidden_, true, true, context.problem.filter.temperature,
                context.options.threads, 0, 0, context.backend.linear_ops()},
               vocab(), tp(), &tp_arrays()),
        first_(layer_.first_row(context.grid.tp_rank())),
        x_(layer_.rows(), hidden_, context.problem.type, space()),
        weight_(columns(), hidden_, context.problem.type, space()),
        logprob_(count()),
        entropy_(count()),
        d_x_(layer_.rows() * hidden_, space()),
        d_weight_(columns() * hidden_, space()) {
    context.release();
    for (const int64_t token : tokens_) {
      targets_.push_back(context.inputs.target(token));
      d_logprob_.push_back(context.inputs.gradient(token, 0));
      d_entropy_.push_back(context.inputs.gradient(token, 1));
    }
    fill_rows(x_.ref(), stream(), [&](int64_t r, std::span<float> to) {
      std::ranges::copy(hidden_row(tokens_[static_cast<size_t>(first_ + r)]), to.begin());
    });
    fill_rows(weight_.ref(), stream(), [&](int64_t c, std::span<float> to) {
      std::ranges::copy(weight_row(first_column() + c), to.begin());
    });
  }

  void start() override {
    forward_ = [this] {
      layer_.forward(x_.ref(), weight_.ref(), targets_, stream(), logprob_.span(), entropy_.span());
    };
    backward_ = [this] {
      layer_.backward(x_.ref(), weight_.ref(), targets_, d_logprob_, d_entropy_, stream(),
                      d_x_.matrix(layer_.rows(), hidden_), d_weight_.matrix(columns(), hidden_));
    };
  }
  void poison() override {
    for (Buffer<float>* results : {&logprob_, &entropy_})
      std::ranges::fill(results->span(), nan_of<float>);
    for (Buffer<float>* results : {&d_x_, &d_weight_})
      stream().fill(results->data(), std::byte{0xff}, results->span().size_bytes());
  }
  /// Own hidden states to everybody, then records; parts of d_x to those whose rows they are.
  std::optional<SentTraffic> expected(Pass pass) const override {
    const int64_t others = tp().size() - 1, own = layer_.rows() * hidden_;
    if (pass == Pass::backward)
      return SentTraffic{others, others == 0 ? 0 : 4 * (count() * hidden_ - own)};
    const SentTraffic records = all_gather_of(tp(), 16 * count());
    return SentTraffic{
        others + records.messages,
        others * own * static_cast<int64_t>(size_of(c_.problem.type)) + records.bytes};
  }
  double ideal_bytes(Pass) const override { return nan_of<double>; }
  /// One product forward; the logits again, and two more, backward, of tokens with a gradient.
  double flops(Pass pass) const override {
    int64_t active = 0;
    for (size_t i = 0; i < tokens_.size(); ++i)
      active += d_logprob_[i] != 0 || d_entropy_[i] != 0 ? 1 : 0;
    const double product = 2.0 * static_cast<double>(hidden_ * valid_columns());
    return pass == Pass::forward ? product * static_cast<double>(count())
                                 : 3 * product * static_cast<double>(active);
  }
  void verify(Pass pass, const std::string& label, Verification& checks) override {
    if (pass == Pass::forward) {
      verify_scores(label, checks);
    } else {
      verify_d_x(label, checks);
      verify_d_weight(label, checks);
    }
  }

 private:
  int64_t count() const { return std::ssize(tokens_); }
  double temperature() const { return c_.problem.filter.temperature; }
  /// A row of made-up numbers.
  std::vector<float> made_up_row(TokenTensor tensor, int64_t index, double scale) const {
    std::vector<float> row(static_cast<size_t>(hidden_));
    fill_token_row({static_cast<uint64_t>(c_.options.seed), tensor}, index, row);
    for (float& value : row) value *= static_cast<float>(scale);
    return row;
  }
  std::vector<float> stored_row(const std::vector<float>& all, int64_t index) const {
    const auto begin = all.begin() + index * hidden_;
    return {begin, begin + hidden_};
  }
  /// To numbers that the type of the run holds exactly.
  std::vector<float> rounded(std::vector<float> row) const {
    if (c_.problem.type == DType::bf16)
      for (float& value : row) value = to_float(to_bf16(value));
    return row;
  }
  std::vector<float> hidden_row(int64_t token) const {
    return rounded(factors_ == nullptr ? made_up_row(TokenTensor::hidden, token, 1)
                                       : stored_row(factors_->hidden, token));
  }
  /// Padded columns hold NaN, which nothing may read.
  std::vector<float> weight_row(int64_t id) const {
    if (id >= vocab().vocab_size)
      return std::vector<float>(static_cast<size_t>(hidden_), nan_of<float>);
    return rounded(factors_ == nullptr ? made_up_row(TokenTensor::weight, id, weight_scale_)
                                       : stored_row(factors_->head, id));
  }
  /// Of two rows of hidden_ elements.
  double product(const std::vector<float>& a, const std::vector<float>& b) const {
    return dot(a.data(), b.data(), hidden_);
  }
  std::vector<int64_t> few(std::vector<int64_t> rows) const {
    const auto most = std::max<int64_t>(1, most_products / (vocab().vocab_size * hidden_));
    if (std::ssize(rows) > most) rows.resize(static_cast<size_t>(most));
    return rows;
  }
  /// Calls body(id, weights of the id) for the whole vocabulary.
  template <class Body>
  void for_each_id(Body body) const {
    for (int64_t id = 0; id < vocab().vocab_size; ++id)
      body(static_cast<size_t>(id), weight_row(id));
  }
  /// Whole rows of logits of these tokens.
  std::vector<std::vector<double>> logits_of(const std::vector<int64_t>& indices) const {
    std::vector<std::vector<float>> x;
    for (const int64_t i : indices) x.push_back(hidden_row(tokens_[static_cast<size_t>(i)]));
    std::vector<std::vector<double>> z(
        indices.size(), std::vector<double>(static_cast<size_t>(vocab().vocab_size)));
    for_each_id([&](size_t id, const std::vector<float>& w) {
      for (size_t s = 0; s < x.size(); ++s) z[s][id] = product(x[s], w);
    });
    return z;
  }
  /// The rms of logits over the temperature.
  double logit_size() const { return logit_scale_ / temperature(); }
  /// The answers of the file; null: compute them.
  const LinearReference* answers() const {
    return reference() == nullptr || !reference()->linear ? nullptr : &*reference()->linear;
  }
  double score_tolerance() const { return linear_logprob_tolerance(hidden_, logit_size()); }
  /// On a device, gradients of logits of bf16 factors are rounded to bf16 themselves.
  double gradient_tolerance(int64_t terms) const {
    const double exact = linear_gradient_tolerance(hidden_, terms, logit_size());
    const bool rounded = space() == MemorySpace::device && c_.problem.type == DType::bf16;
    return rounded ? exact + logit_gradient_tolerance(DType::bf16) : exact;
  }

  void verify_scores(const std::string& label, Verification& checks) {
    Check& scores = check_of(label, "log-probabilities", score_tolerance(), checks);
    Check& entropies = check_of(label, "entropies", score_tolerance(), checks);
    const std::vector<int64_t> some = few(sample(tokens_));
    const auto z = logits_of(some);
    for (size_t s = 0; s < some.size(); ++s) {
      const auto i = static_cast<size_t>(some[s]);
      TokenScore want = score_row_reference(z[s], targets_[i], temperature());
      if (answers() != nullptr) {
        const auto at = static_cast<size_t>(tokens_[i]);
        want = {answers()->logprob[at], answers()->entropy[at]};
      }
      const auto place = [&] { return fmt::format("token {} id {}", tokens_[i], targets_[i]); };
      scores.add(static_cast<double>(logprob_[some[s]]), want.logprob, place,
                 logprob_scale(want.logprob));
      entropies.add(static_cast<double>(entropy_[some[s]]), want.entropy, place,
                    entropy_scale(vocab().vocab_size));
    }
    check_same_bits(label, logprob_.span(), tp(), checks);
    check_same_bits(label, entropy_.span(), tp(), checks);
  }

  /// What makes the gradient of token i's logits.
  struct Slopes {
    double a, b, weight;
  };
  Slopes slopes(size_t i, double entropy) const {
    const auto g = static_cast<double>(d_logprob_[i]), h = static_cast<double>(d_entropy_[i]);
    return {-(g + h * entropy) / temperature(), -h / temperature(), g / temperature()};
  }
  /// A logit's gradient, and what its errors are relative to.
  static std::pair<double, double> logit_gradient(double logprob, const Slopes& s, bool is_target) {
    const double weight = is_target ? s.weight : 0;
    return {std::exp(logprob) * (s.a + s.b * logprob) + weight,
            logit_gradient_scale(logprob, s.a, s.b, std::abs(weight))};
  }

  /// dX = G W: rows of this rank.
  void verify_d_x(const std::string& label, Verification& checks) {
    Check& check = check_of(label, "d_x", gradient_tolerance(vocab().vocab_size), checks);
    const auto mine =
        std::span(tokens_).subspan(static_cast<size_t>(first_), static_cast<size_t>(layer_.rows()));
    if (mine.empty()) check.add_nothing();
    std::vector<int64_t> some = few(sample(mine));
    for (int64_t& i : some) i += first_;
    auto logprobs = logits_of(some);
    std::vector<Slopes> of_token;
    for (size_t s = 0; s < some.size(); ++s) {
      const double entropy = score_row_reference(logprobs[s], -1, temperature()).entropy;
      logprobs[s] = log_softmax_reference(logprobs[s], temperature());
      of_token.push_back(slopes(static_cast<size_t>(some[s]), entropy));
    }
    const std::vector<double> zeros(static_cast<size_t>(hidden_), 0);
    std::vector<std::vector<double>> want(some.size(), zeros), squares(some.size(), zeros);
    for_each_id([&](size_t id, const std::vector<float>& w) {
      for (size_t s = 0; s < some.size(); ++s) {
        const bool is_target = targets_[static_cast<size_t>(some[s])] == static_cast<int64_t>(id);
        const auto [g, size] = logit_gradient(logprobs[s][id], of_token[s], is_target);
        for (size_t d = 0; d < w.size(); ++d) {
          const auto weight = static_cast<double>(w[d]);
          want[s][d] += g * weight;
          squares[s][d] += size * weight * size * weight;
        }
      }
    });
    for (size_t s = 0; s < some.size(); ++s) {
      const int64_t token = tokens_[static_cast<size_t>(some[s])];
      if (answers() != nullptr) want[s] = answer_row(answers()->d_hidden, token);
      add_row(check, values_of(host_row(d_x_.matrix(layer_.rows(), hidden_), some[s] - first_)),
              want[s], squares[s], [&] { return fmt::format("token {}", token); });
    }
  }

  /// dW = G^T X: some of this rank's columns, from the normalisers that the forward pass implies,
  /// which is verified by itself.
  void verify_d_weight(const std::string& label, Verification& checks) {
    const int64_t most_rows = ceil_div(c_.problem.tokens(), c_.grid.shape().cp);
    Check& check = check_of(label, "d_weight", gradient_tolerance(most_rows), checks);
    std::vector<int64_t> ids(static_cast<size_t>(valid_columns()));
    std::iota(ids.begin(), ids.end(), first_column());
    const std::vector<int64_t> some = sample(ids);
    if (some.empty()) check.add_nothing();
    std::vector<std::vector<float>> w;
    for (const int64_t c : some) w.push_back(weight_row(first_column() + c));
    const std::vector<double> zeros(static_cast<size_t>(hidden_), 0);
    std::vector<std::vector<double>> want(some.size(), zeros), squares(some.size(), zeros);
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const std::vector<float> x = hidden_row(tokens_[i]);
      const double log_sum = log_sum_of(i, x);
      const Slopes of_token = slopes(i, static_cast<double>(entropy_[static_cast<int64_t>(i)]));
      for (size_t s = 0; s < some.size(); ++s) {
        const bool is_target = targets_[i] == first_column() + some[s];
        const auto [g, size] =
            logit_gradient(product(x, w[s]) / temperature() - log_sum, of_token, is_target);
        for (size_t d = 0; d < x.size(); ++d) {
          const auto value = static_cast<double>(x[d]);
          want[s][d] += g * value;
          squares[s][d] += size * value * size * value;
        }
      }
    }
    for (size_t s = 0; s < some.size(); ++s) {
      std::vector<double> got = values_of(host_row(d_weight_.matrix(columns(), hidden_), some[s]));
      if (answers() != nullptr) {  // of all tokens, where each rank has a part of them
        for (std::vector<double>* parts : {&got, &squares[s]}) sum_over_tokens(*parts);
        want[s] = answer_row(answers()->d_head, first_column() + some[s]);
      }
      add_row(check, got, want[s], squares[s],
              [&] { return fmt::format("column {}", first_column() + some[s]); });
    }
  }
  std::vector<double> answer_row(const std::vector<double>& all, int64_t index) const {
    const auto begin = all.begin() + index * hidden_;
    return {begin, begin + hidden_};
  }
  static std::vector<double> values_of(ConstMatrixRef row) {
    std::vector<double> values;
    for (int64_t d = 0; d < row.cols; ++d) values.push_back(static_cast<double>(row.at(0, d)));
    return values;
  }
  /// values <- their sums over the ranks that share the tokens. Collective over these.
  void sum_over_tokens(std::vector<double>& values) const {
    HostStream host;
    c_.grid.cp()
        .all_reduce(values.data(), std::ssize(values), DType::f64, ReduceOp::sum, host,
                    "summing d_weight for a check")
        ->wait();
  }
  /// Compares a row of a gradient; `squares` are those of the terms of each element.
  template <class Where>
  static void add_row(Check& check, const std::vector<double>& got, const std::vector<double>& want,
                      const std::vector<double>& squares, Where where) {
    const double mean =
        std::accumulate(squares.begin(), squares.end(), 0.0) / static_cast<double>(squares.size());
    const double scale = error_scale(want, std::sqrt(mean));
    for (size_t d = 0; d < want.size(); ++d)
      check.add(
          got[d], want[d], [&] { return fmt::format("{} element {}", where(), d); }, scale);
  }
  /// Of the exponentials of token i's logits over the temperature.
  double log_sum_of(size_t i, const std::vector<float>& x) const {
    if (vocab().owner(targets_[i]) >= 0)
      return product(x, weight_row(targets_[i])) / temperature() -
             static_cast<double>(logprob_[static_cast<int64_t>(i)]);
    const std::vector<double> z = logits_of({static_cast<int64_t>(i)})[0];
    return z[0] / temperature() - log_softmax_reference(z, temperature())[0];
  }

  int64_t hidden_;
  const LinearFactors* factors_;  // null: made up
  double logit_scale_;            // root of the mean square of logits, or a bound of it
  double weight_scale_;
  std::vector<int64_t> tokens_;  // of this context-parallel rank
  FusedLinear layer_;
  int64_t first_;
  LogitMatrix x_, weight_;
  std::vector<int32_t> targets_;
  Buffer<float> logprob_, entropy_, d_x_, d_weight_;
  std::vector<float> d_logprob_, d_entropy_;
};

/// Hidden states of all ranks, two parts of their gradient that leave and one that comes; weights
/// and their gradient; on a GPU, a tile of logits and of their gradient.
double matrix_bytes(const MemoryCase& run) {
  const auto hidden = static_cast<double>(run.problem.hidden);
  const double tile =
      run.options.backend.on_gpu()
          ? 6 * std::min(run.tokens(), static_cast<double>(usual_cuda_tile.rows)) *
                std::min(run.columns(), static_cast<double>(usual_cuda_tile.columns))
          : 0;
  return tile + run.tokens() * hidden * (3 * run.element_bytes() + 12) +
         run.columns() * hidden * (run.element_bytes() + 4);
}

}  // namespace

LogprobsOperation fused_linear_operation() {
  return {
      .name = "fused-linear",
      .summary = "hidden states to log-probability and entropy, no logits",
      .definition = "score_row_reference, log_softmax_reference",
      .forward = RowTraffic::products,
      .backward = RowTraffic::products,
      .figure = {RateShown::always, "fused_linear_rate", "TFLOP/s/rank"},
      .make = [](LogprobsContext& context, bool) { return std::make_unique<LinearOp>(context); },
      .bytes_without_logits = matrix_bytes};
}

}  // namespace gyre
