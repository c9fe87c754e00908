// fused-linear: hidden states to log-probabilities and entropies, without stored logits.
//
// References: score_row_reference and log_softmax_reference of the product of hidden states and
// head weight, both in double precision, or the answers of the file. Forward sends hidden states
// in one message to every other rank, then does one all-gather of 16 bytes per token. Backward
// sends every other rank one message with the f32 gradient of that rank's hidden states.

#include "logprobs/fused_linear/fused_linear.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "apps/logprobs/operation.hpp"
#include "core/dot.hpp"
#include "core/special_values.hpp"
#include "logprobs/fused_linear/fused_linear_cuda.hpp"
#include "logprobs/reference.hpp"

namespace gyre {
namespace {

/// Limit of products per check, about one second of work. It reduces samples of large vocabularies.
constexpr int64_t max_products = int64_t{1} << 29;

/// Takes hidden states and weights from the file if it has them. Otherwise hidden states are random
/// normal numbers, and weights are scaled so that logits have the size that the options set.
class LinearOp final : public LogprobsOp {
 public:
  explicit LinearOp(LogprobsContext& context)
      : LogprobsOp(context),
        hidden_(context.problem.hidden),
        factors_(context.inputs.linear()),
        logit_scale_(!factors_ ? context.options.logit_scale : factors_->logit_size()),
        weight_scale_(logit_scale_ / std::sqrt(hidden_)),
        tokens_(context.tokens_in_order()),
        temperatures_(context.temperatures(tokens_)),
        layer_({.tokens = count(),
                .hidden = hidden_,
                .entropy = true,
                .temperature = context.problem.filter.temperature,
                .threads = context.options.threads,
                .ops = context.backend.linear_ops(),
                .temperatures = temperatures_},
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
      std::ranges::copy(hidden_row(tokens_[first_ + r]), to.begin());
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
      layer_.backward(x_.ref(), weight_.ref(), targets_,
                      {d_logprob_, d_entropy_, d_x_.matrix(layer_.rows(), hidden_),
                       d_weight_.matrix(columns(), hidden_)},
                      stream());
    };
  }
  void poison() override {
    for (Buffer<float>* results : {&logprob_, &entropy_})
      std::ranges::fill(results->span(), nan_of<float>);
    for (Buffer<float>* results : {&d_x_, &d_weight_})
      stream().fill(results->data(), std::byte{0xff}, results->span().size_bytes());
  }
  /// Forward sends own hidden states to all ranks, then gathers. Backward sends d_x to row owners.
  std::optional<SentTraffic> expected(Pass pass) const override {
    const int64_t others = tp().size() - 1, own = layer_.rows() * hidden_;
    if (pass == Pass::backward)
      return SentTraffic{others, others == 0 ? 0 : 4 * (count() * hidden_ - own)};
    const SentTraffic records = all_gather_of(tp(), 16 * count());
    return SentTraffic{others + records.messages,
                       others * own * size_of(c_.problem.type) + records.bytes};
  }
  double ideal_bytes(Pass) const override { return nan_of<double>; }
  /// Forward: one product. Backward: three, with recomputed logits, for tokens with a gradient.
  double flops(Pass pass) const override {
    int64_t active = 0;
    for (size_t i = 0; i < tokens_.size(); ++i)
      active += d_logprob_[i] != 0 || d_entropy_[i] != 0 ? 1 : 0;
    const double product = 2.0 * (hidden_ * valid_columns());
    return product * (pass == Pass::forward ? count() : 3 * active);
  }
  void verify(Pass pass, Verification& checks) override {
    LogprobsOp::verify(pass, checks);
    if (pass == Pass::backward) return;
    check_same_bits(logprob_.span(), tp(), checks);
    check_same_bits(entropy_.span(), tp(), checks);
  }

 private:
  int64_t count() const { return std::ssize(tokens_); }
  /// A row of generated normal numbers times `scale`.
  std::vector<float> made_up_row(TokenTensor tensor, int64_t index, double scale) const {
    std::vector<float> row(hidden_);
    fill_token_row({static_cast<uint64_t>(c_.options.seed), tensor}, index, row);
    for (float& value : row) value *= static_cast<float>(scale);
    return row;
  }
  std::vector<float> stored_row(std::span<const float> all, int64_t index) const {
    const auto row = all.subspan(index * hidden_, hidden_);
    return {row.begin(), row.end()};
  }
  /// Rounds to the workload's type.
  std::vector<float> rounded(std::vector<float> row) const {
    if (c_.problem.type == DType::bf16)
      for (float& value : row) value = to_float(to_bf16(value));
    return row;
  }
  std::vector<float> hidden_row(int64_t token) const {
    return rounded(!factors_ ? made_up_row(TokenTensor::hidden, token, 1)
                             : stored_row(factors_->hidden, token));
  }
  /// Padding columns hold NaN and must not be read.
  std::vector<float> weight_row(int64_t id) const {
    if (id >= vocab().vocab_size) return std::vector<float>(hidden_, nan_of<float>);
    return rounded(!factors_ ? made_up_row(TokenTensor::weight, id, weight_scale_)
                             : stored_row(factors_->head, id));
  }
  double product(const std::vector<float>& a, const std::vector<float>& b) const {
    return dot(a.data(), b.data(), hidden_);
  }
  int64_t max_rows() const {
    return std::max<int64_t>(1, max_products / (vocab().vocab_size * hidden_));
  }
  /// Calls body(id, weight row of the id) for the whole vocabulary.
  template <class Body>
  void for_each_id(Body body) const {
    for (int64_t id = 0; id < vocab().vocab_size; ++id)
      body(static_cast<size_t>(id), weight_row(id));
  }
  /// Whole rows of logits of the tokens at `indices`.
  std::vector<std::vector<double>> logits_of(std::span<const size_t> indices) const {
    std::vector<std::vector<float>> x;
    for (const size_t i : indices) x.push_back(hidden_row(tokens_[i]));
    std::vector<std::vector<double>> z(indices.size(), std::vector<double>(vocab().vocab_size));
    for_each_id([&](size_t id, const std::vector<float>& w) {
      for (size_t s = 0; s < x.size(); ++s) z[s][id] = product(x[s], w);
    });
    return z;
  }
  double heat(size_t i) const { return temperature(tokens_[i]); }
  /// RMS of the logits divided by the least temperature of a token.
  double logit_size() const {
    double least = c_.problem.filter.temperature;
    for (int64_t t = 0; c_.problem.per_token() && t < c_.problem.tokens(); ++t)
      least = t == 0 ? temperature(t) : std::min(least, temperature(t));
    return logit_scale_ / least;
  }
  double score_tolerance() const { return linear_logprob_tolerance(hidden_, logit_size()); }
  /// On a device with bf16 factors, logit gradients are rounded to bf16 too.
  double gradient_tolerance(int64_t terms) const {
    const double exact = linear_gradient_tolerance(hidden_, terms, logit_size());
    return rounds_gradients() ? exact + logit_gradient_tolerance(DType::bf16) : exact;
  }
  bool rounds_gradients() const {
    return space() == MemorySpace::device && c_.problem.type == DType::bf16;
  }
  double gradient_sigma() const {
    return rounds_gradients() ? narrow_deviation * epsilon_of(DType::bf16) : 0;
  }

  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::backward) return {hidden_gradient(), head_gradient()};
    ResultArray scores = shared_array<float>("linear_logprob", "log-probabilities",
                                             score_tolerance(), tokens_, logprob_.span(), 0);
    ResultArray entropies = shared_array<float>("linear_entropy", "entropies", score_tolerance(),
                                                tokens_, entropy_.span(), 0);
    scores.expect = [this](ResultArray::Batch batch) {
      return expected_scores(batch,
                             [](const TokenScore& score) { return scored({score.logprob}); });
    };
    entropies.expect = [this](ResultArray::Batch batch) {
      return expected_scores(batch, [this](const TokenScore& score) {
        return ExpectedRow{{score.entropy}, {entropy_scale(vocab().vocab_size)}};
      });
    };
    for (ResultArray* array : {&scores, &entropies}) array->sample_rows = max_rows();
    return {scores, entropies};
  }
  template <class Row>
  std::vector<ExpectedRow> expected_scores(ResultArray::Batch batch, Row row) const {
    std::vector<ExpectedRow> rows;
    const auto z = logits_of(batch);
    for (size_t b = 0; b < batch.size(); ++b)
      rows.push_back(row(score_row_reference(z[b], targets_[batch[b]], heat(batch[b]))));
    return rows;
  }

  /// Coefficients of the gradient of one token's logits; see logit_gradient().
  struct Slopes {
    double a, b, weight;
  };
  Slopes slopes(size_t i, double entropy) const {
    const double g = d_logprob_[i], h = d_entropy_[i];
    return {-(g + h * entropy) / heat(i), -h / heat(i), g / heat(i)};
  }
  /// Accumulates gradient rows as sums of products, and the squared error scales of the products.
  struct GradientSums {
    size_t width;
    std::vector<double> values, squares;  // [rows, width]

    GradientSums(size_t count, int64_t hidden)
        : width(static_cast<size_t>(hidden)), values(count * width, 0), squares(values) {}
    /// Adds `gradient`, a logit's gradient and its error scale, times `factors`.
    void add(size_t row, const std::pair<double, double>& gradient,
             const std::vector<float>& factors) {
      for (size_t d = 0; d < width; ++d) {
        const double factor = factors[d];
        const double size = gradient.second * factor;
        values[row * width + d] += gradient.first * factor;
        squares[row * width + d] += size * size;
      }
    }
    std::vector<ExpectedRow> rows() const {
      std::vector<ExpectedRow> all;
      for (size_t begin = 0; begin < values.size(); begin += width) {
        const auto row = std::span(values).subspan(begin, width),
                   of_terms = std::span(squares).subspan(begin, width);
        const double mean = std::accumulate(of_terms.begin(), of_terms.end(), 0.0) / width;
        const double scale = error_scale(row, std::sqrt(mean));
        all.push_back({{row.begin(), row.end()}, std::vector<double>(width, scale)});
      }
      return all;
    }
  };
  /// A logit's gradient and its error scale.
  static std::pair<double, double> logit_gradient(double logprob, const Slopes& s, bool is_target) {
    const double weight = is_target ? s.weight : 0;
    return {std::exp(logprob) * (s.a + s.b * logprob) + weight,
            logit_gradient_scale(logprob, s.a, s.b, std::abs(weight))};
  }

  /// dX = G W for the rows of this rank, where G is the gradient of the logits.
  ResultArray hidden_gradient() {
    const auto mine = std::span(tokens_).subspan(first_, layer_.rows());
    ResultArray array{
        "d_hidden", {c_.problem.tokens(), hidden_}, "d_x", gradient_tolerance(vocab().vocab_size)};
    array.sigma = gradient_sigma();
    array.columns = hidden_;
    array.sample_rows = max_rows();
    array.rows.assign(mine.begin(), mine.end());
    array.read = read_rows(hidden_, [this](size_t r, std::span<double> to) {
      read_row(d_x_.matrix(layer_.rows(), hidden_), r, to);
    });
    array.expect = [this](ResultArray::Batch batch) { return expected_d_hidden(batch); };
    return array;
  }
  std::vector<ExpectedRow> expected_d_hidden(ResultArray::Batch batch) const {
    std::vector<size_t> some(batch.begin(), batch.end());
    for (size_t& i : some) i += first_;
    auto logprobs = logits_of(some);
    std::vector<Slopes> of_token;
    for (size_t s = 0; s < some.size(); ++s) {
      const double entropy = score_row_reference(logprobs[s], -1, heat(some[s])).entropy;
      logprobs[s] = log_softmax_reference(logprobs[s], heat(some[s]));
      of_token.push_back(slopes(some[s], entropy));
    }
    GradientSums sums(some.size(), hidden_);
    for_each_id([&](size_t id, const std::vector<float>& w) {
      for (size_t s = 0; s < some.size(); ++s) {
        const bool is_target = targets_[some[s]] == static_cast<int64_t>(id);
        sums.add(s, logit_gradient(logprobs[s][id], of_token[s], is_target), w);
      }
    });
    return sums.rows();
  }

  /// dW = G^T X for this rank's columns, summed over context-parallel ranks; G as in dX. The
  /// reference takes normalisers from the forward results, which are verified separately.
  ResultArray head_gradient() {
    const int64_t max_terms = ceil_div(c_.problem.tokens(), c_.grid.shape().cp);
    ResultArray array{
        "d_head", {vocab().vocab_size, hidden_}, "d_weight", gradient_tolerance(max_terms)};
    array.sigma = gradient_sigma();
    array.columns = hidden_;
    array.shown = c_.grid.cp_rank() == 0;
    array.of_tokens = false;
    array.rows.resize(valid_columns());
    std::iota(array.rows.begin(), array.rows.end(), first_column());
    array.read = [this](ResultArray::Batch batch, std::span<double> to) {
      const size_t width = hidden_;
      for (size_t b = 0; b < batch.size(); ++b)
        read_row(d_weight_.matrix(columns(), hidden_), batch[b], to.subspan(b * width, width));
      sum_over_tokens(to);
    };
    array.expect = [this](ResultArray::Batch batch) { return expected_d_head(batch); };
    return array;
  }
  std::vector<ExpectedRow> expected_d_head(ResultArray::Batch batch) const {
    std::vector<std::vector<float>> w;
    for (const size_t c : batch) w.push_back(weight_row(first_column() + static_cast<int64_t>(c)));
    GradientSums sums(batch.size(), hidden_);
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const std::vector<float> x = hidden_row(tokens_[i]);
      const double log_sum = log_sum_of(i, x);
      const Slopes of_token = slopes(i, entropy_[i]);
      for (size_t s = 0; s < batch.size(); ++s) {
        const bool is_target = targets_[i] == first_column() + static_cast<int64_t>(batch[s]);
        const double logprob = product(x, w[s]) / heat(i) - log_sum;
        sums.add(s, logit_gradient(logprob, of_token, is_target), x);
      }
    }
    sum_over_tokens(sums.values);
    sum_over_tokens(sums.squares);
    return sums.rows();
  }
  /// Sums `values` in place over context-parallel ranks. Collective over these.
  void sum_over_tokens(std::span<double> values) const {
    HostStream host;
    c_.grid.cp()
        .all_reduce(values.data(), std::ssize(values), DType::f64, ReduceOp::sum, host,
                    "summing d_weight for a check")
        ->wait();
  }
  /// Log-sum-exp of token i's logits divided by the temperature.
  double log_sum_of(size_t i, const std::vector<float>& x) const {
    if (vocab().owner(targets_[i]) >= 0)
      return product(x, weight_row(targets_[i])) / heat(i) - logprob_[i];
    const std::vector<double> z = logits_of(std::span(&i, 1))[0];
    return z[0] / heat(i) - log_softmax_reference(z, heat(i))[0];
  }

  int64_t hidden_;
  std::optional<LinearFactors> factors_;  // none if generated
  double logit_scale_;                    // RMS of the logits, or a bound of it
  double weight_scale_;
  std::vector<int64_t> tokens_;       // tokens of this context-parallel rank
  std::vector<double> temperatures_;  // [tokens_], or empty: one for all
  FusedLinear layer_;
  int64_t first_;
  LogitMatrix x_, weight_;
  std::vector<int32_t> targets_;
  Buffer<float> logprob_, entropy_, d_x_, d_weight_;
  std::vector<float> d_logprob_, d_entropy_;
};

/// Bytes of the hidden states of all ranks, two send parts and one receive part of their gradient,
/// the weights and their gradient, and on a GPU a tile of logits and of their gradient.
double matrix_bytes(const MemoryCase& run) {
  const double hidden = run.problem.hidden;
  const TileSize most = usual_tile(MemorySpace::device);
  const double tile = run.options.backend.on_gpu()
                          ? 6 * std::min(run.tokens(), static_cast<double>(most.rows)) *
                                std::min(run.columns(), static_cast<double>(most.columns))
                          : 0;
  return tile + run.tokens() * hidden * (3 * run.element_bytes() + 12) +
         run.columns() * hidden * (run.element_bytes() + 4);
}

}  // namespace

LogprobsOperation fused_linear_operation() {
  return {.name = "fused-linear",
          .summary = "log-probability and entropy from hidden states, without storing logits",
          .definition = "score_row_reference, log_softmax_reference",
          .methods = {{"gyre", makes<LinearOp>()}},
          .forward = RowTraffic::products,
          .backward = RowTraffic::products,
          .needs = {{"hidden"}},
          .arrays = {{"linear_logprob", "T", false, {"hidden", "head"}},
                     {"linear_entropy", "T", false, {"hidden", "head"}},
                     {"d_hidden", "TD", false, {"hidden", "head", "d_value", "d_entropies"}},
                     {"d_head", "VD", false, {"hidden", "head", "d_value", "d_entropies"}}},
          .figure = {RateShown::always, "fused_linear_rate", "TFLOP/s/rank"},
          .bytes_without_logits = matrix_bytes};
}

}  // namespace gyre
