#include "recurrence/recurrence_reference.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "recurrence/convolution.hpp"
#include "recurrence/convolution_reference.hpp"

namespace gyre {
namespace {

/// A number that is computed: its value, and sums of squares of the terms that it is the sum of.
struct Sized {
  double value = 0;
  double terms = 0;   ///< of values alone
  double errors = 0;  ///< with the errors of the factors of terms
};
/// Sum of the squares of the terms of a product, of which each factor has an error.
double product_size(const Sized& a, const Sized& b) {
  return a.value * a.value * (b.value * b.value + b.errors) + a.errors * b.value * b.value;
}

/// A factor, and the square of its error.
struct Factor {
  double value = 0, error = 0;
  Factor operator*(double by) const { return {value * by, error * by * by}; }
};

/// The state of a head, or its gradient, [key_dim, value_dim] each.
struct State {
  std::vector<double> values, terms, errors;  ///< as in Sized
  explicit State(int64_t elements)
      : values(elements, 0.0), terms(elements, 0.0), errors(elements, 0.0) {}
  Sized at(int64_t i) const { return {values[i], terms[i], errors[i]}; }
  void multiply(int64_t i, double factor) {
    values[i] *= factor;
    terms[i] *= factor * factor;
    errors[i] *= factor * factor;
  }
  /// Adds factor · x. What x has inherited from this state is no new error: `terms` count.
  void add(int64_t i, const Factor& factor, const Sized& x) {
    const double square = factor.value * factor.value, inexact = factor.error * x.value * x.value;
    values[i] += factor.value * x.value;
    terms[i] += square * x.value * x.value + inexact;
    errors[i] += square * x.terms + inexact;
  }
};

/// A dot product with a column of a state.
struct Sum : Sized {
  void add(const Factor& factor, const State& s, int64_t i) {
    const double square = factor.value * factor.value;
    const double own = (square + factor.error) * s.values[i] * s.values[i];
    value += factor.value * s.values[i];
    terms += own + square * s.terms[i];
    errors += own + square * s.errors[i];
  }
};

class Definition {
 public:
  Definition(const RecurrenceShape& shape, const RecurrenceHead& head)
      : shape_(shape),
        head_(head),
        keys_(shape.key_dim),
        values_(shape.value_dim),
        residual_(shape.value_dim),
        d_u_(shape.value_dim) {}

  RecurrenceHeadResults run(bool backward) {
    const int64_t every = recurrence_chunk, tokens = head_.tokens;
    std::vector<State> kept;  // before tokens 0, every, 2 · every, ...
    State state(shape_.state_elements());
    results_.out = rows(values_);
    for (int64_t t = 0; t < tokens; ++t) {
      if (backward && t % every == 0) kept.push_back(state);
      advance(t, state);
      output(t, state);
    }
    if (!backward) return std::move(results_);
    results_.d_q = rows(keys_);
    results_.d_k = rows(keys_);
    results_.d_v = rows(values_);
    results_.d_g = rows(shape_.decay_dim());
    if (shape_.delta) results_.d_beta = rows(1);
    State gradient(shape_.state_elements());
    for (int64_t begin = (tokens - 1) / every * every; begin >= 0 && tokens > 0; begin -= every) {
      std::vector<State> states{std::move(kept.back())};
      kept.pop_back();
      const int64_t end = std::min(tokens, begin + every);
      for (int64_t t = begin; t < end; ++t) {
        states.push_back(states.back());
        advance(t, states.back());
      }
      for (int64_t t = end - 1; t >= begin; --t)
        retreat(t, states[t - begin], states[t - begin + 1], gradient);
    }
    add_chunk_terms();
    return std::move(results_);
  }

 private:
  SizedRows rows(int64_t dim) const {
    return {std::vector<double>(head_.tokens * dim, 0.0), std::vector<double>(head_.tokens, 0.0)};
  }
  const double* row(const std::vector<double>& array, int64_t t, int64_t dim) const {
    return array.data() + t * dim;
  }
  double decay(int64_t t, int64_t c) const {
    const int64_t dim = shape_.decay_dim();
    return std::exp(head_.g[t * dim + (shape_.channel_decay ? c : 0)]);
  }
  /// Element i of an array whose squares of errors are `errors`.
  static Factor factor(const std::vector<double>& array, const std::vector<double>& errors,
                       int64_t i) {
    return {array[i], errors.empty() ? 0 : errors[i]};
  }
  Factor key(int64_t t, int64_t c) const { return factor(head_.k, head_.k_errors, t * keys_ + c); }
  Factor query(int64_t t, int64_t c) const {
    return factor(head_.q, head_.q_errors, t * keys_ + c);
  }
  double beta(int64_t t) const { return shape_.delta ? head_.beta[t] : 1; }

  /// S <- D S; residual_ <- v - Sᵀ k, which is v without the delta rule.
  void decay_state(int64_t t, State& s) {
    for (int64_t c = 0; c < keys_; ++c) {
      const double a = decay(t, c);
      for (int64_t i = c * values_; i < (c + 1) * values_; ++i) s.multiply(i, a);
    }
    for (int64_t e = 0; e < values_; ++e) {
      const Factor v = factor(head_.v, head_.v_errors, t * values_ + e);
      const double square = v.value * v.value + v.error;
      residual_[e] = {{v.value, square, square}};
      for (int64_t c = 0; shape_.delta && c < keys_; ++c)
        residual_[e].add(key(t, c) * -1, s, c * values_ + e);
    }
  }
  void advance(int64_t t, State& s) {
    decay_state(t, s);
    const double b = beta(t);
    for (int64_t c = 0; c < keys_; ++c)
      for (int64_t e = 0; e < values_; ++e) {
        const int64_t i = c * values_ + e;
        s.add(i, key(t, c) * b, residual_[e]);
      }
  }
  void output(int64_t t, const State& s) {
    double size = 0;
    for (int64_t e = 0; e < values_; ++e) {
      double sum = 0;
      for (int64_t c = 0; c < keys_; ++c) {
        const int64_t i = c * values_ + e;
        const Factor q = query(t, c);
        sum += q.value * s.values[i];
        size += q.value * q.value * (s.values[i] * s.values[i] + s.errors[i]) +
                q.error * s.values[i] * s.values[i];
      }
      results_.out.values[t * values_ + e] = shape_.scale * sum;
    }
    results_.out.sizes[t] = shape_.scale * std::sqrt(size / static_cast<double>(values_));
  }

  /// Gradients of token t from `g`, that of the state behind it, which becomes that of the state
  /// before it. The states are those before and behind the token.
  void retreat(int64_t t, const State& before, const State& behind, State& g) {
    query_gradient(t, behind, g);
    State decayed = before;
    decay_state(t, decayed);
    update_gradients(t, decayed, g);
    decay_gradient(t, decayed, g);
  }
  void query_gradient(int64_t t, const State& s, State& g) {
    const double* d_out = row(head_.d_out, t, values_);
    double size = 0;
    for (int64_t c = 0; c < keys_; ++c) {
      double sum = 0;
      for (int64_t e = 0; e < values_; ++e) {
        const int64_t i = c * values_ + e;
        const double d = shape_.scale * d_out[e];
        sum += d * s.values[i];
        size += d * d * (s.values[i] * s.values[i] + s.errors[i]);
        g.add(i, query(t, c), {d, d * d, d * d});
      }
      results_.d_q.values[t * keys_ + c] = sum;
    }
    results_.d_q.sizes[t] = std::sqrt(size / static_cast<double>(keys_));
  }
  /// Gradients of k, v and beta; g becomes that of D S. `s` is D S.
  void update_gradients(int64_t t, const State& s, State& g) {
    const double b = beta(t);
    double d_v_size = 0, d_beta = 0, d_beta_size = 0, d_k_size = 0;
    for (int64_t e = 0; e < values_; ++e) {
      d_u_[e] = {};
      for (int64_t c = 0; c < keys_; ++c) d_u_[e].add(key(t, c), g, c * values_ + e);
      results_.d_v.values[t * values_ + e] = b * d_u_[e].value;
      d_v_size += b * b * d_u_[e].errors;
      d_beta += d_u_[e].value * residual_[e].value;
      d_beta_size += product_size(d_u_[e], residual_[e]);
    }
    for (int64_t c = 0; c < keys_; ++c) {
      double d_k = 0;
      for (int64_t e = 0; e < values_; ++e) {
        const int64_t i = c * values_ + e;
        d_k += b * g.values[i] * residual_[e].value;
        d_k_size += b * b * product_size(g.at(i), residual_[e]);
        if (!shape_.delta) continue;
        d_k -= b * s.values[i] * d_u_[e].value;
        d_k_size += b * b * product_size(s.at(i), d_u_[e]);
        g.add(i, key(t, c) * -b, d_u_[e]);
      }
      results_.d_k.values[t * keys_ + c] = d_k;
    }
    results_.d_k.sizes[t] = std::sqrt(d_k_size / static_cast<double>(keys_));
    results_.d_v.sizes[t] = std::sqrt(d_v_size / static_cast<double>(values_));
    if (!shape_.delta) return;
    results_.d_beta.values[t] = d_beta;
    results_.d_beta.sizes[t] = std::sqrt(d_beta_size);
  }
  /// Gradient of g; the gradient of D S becomes that of S. `s` is D S.
  void decay_gradient(int64_t t, const State& s, State& g) {
    const int64_t dim = shape_.decay_dim();
    double size = 0;
    for (int64_t c = 0; c < keys_; ++c) {
      const double a = decay(t, c);
      for (int64_t i = c * values_; i < (c + 1) * values_; ++i) {
        results_.d_g.values[t * dim + (shape_.channel_decay ? c : 0)] += g.values[i] * s.values[i];
        size += product_size(g.at(i), s.at(i));
        g.multiply(i, a);
      }
    }
    results_.d_g.sizes[t] = std::sqrt(size / static_cast<double>(dim));
  }
  /// Includes the terms q d_q and k d_k of the tokens of a chunk in the sizes of d_g.
  void add_chunk_terms() {
    const auto mean_square = [&](const std::vector<double>& array,
                                 const std::vector<double>& errors, int64_t t) {
      double sum = 0;
      for (int64_t c = 0; c < keys_; ++c) {
        const Factor x = factor(array, errors, t * keys_ + c);
        sum += x.value * x.value + x.error;
      }
      return sum / static_cast<double>(shape_.decay_dim());
    };
    std::vector<double> terms(head_.tokens + 1, 0.0);  // prefix sums
    for (int64_t t = 0; t < head_.tokens; ++t)
      terms[t + 1] = terms[t] +
                     mean_square(head_.q, head_.q_errors, t) * std::pow(results_.d_q.sizes[t], 2) +
                     mean_square(head_.k, head_.k_errors, t) * std::pow(results_.d_k.sizes[t], 2);
    for (int64_t t = 0; t < head_.tokens; ++t) {
      const int64_t end = std::min(head_.tokens, t + recurrence_chunk);
      results_.d_g.sizes[t] = std::hypot(results_.d_g.sizes[t], std::sqrt(terms[end] - terms[t]));
    }
  }

  const RecurrenceShape& shape_;
  const RecurrenceHead& head_;
  int64_t keys_, values_;
  std::vector<Sum> residual_;  // [value_dim] v - S'ᵀ k
  std::vector<Sum> d_u_;       // [value_dim]
  RecurrenceHeadResults results_;
};

}  // namespace

RecurrenceHeadResults recurrence_reference(const RecurrenceShape& shape, const RecurrenceHead& head,
                                           bool backward) {
  return Definition(shape, head).run(backward);
}

namespace {

/// One head of an input array over a document, [tokens, dim].
std::vector<double> head_of(const RecurrenceShape& shape, const RecurrenceRows& rows,
                            RecurrenceArray array, const DocumentTokens& document, int64_t head) {
  const int64_t dim = dim_of(shape, array);
  std::vector<float> row(width_of(shape, array));
  std::vector<double> values;
  for (int64_t t = 0; t < document.tokens; ++t) {
    rows(array, document.begin + t, row);
    values.insert(values.end(), row.begin() + head * dim, row.begin() + (head + 1) * dim);
  }
  return values;
}

/// Makes `from` head `head` of `heads` of `to`; adds it if they are one head.
void put_head(const SizedRows& from, int64_t tokens, int64_t head, int64_t heads, SizedRows& to) {
  const int64_t dim = tokens == 0 ? 0 : std::ssize(from.values) / tokens;
  to.values.resize(tokens * heads * dim, 0.0);
  to.sizes.resize(tokens * heads, 0.0);
  for (int64_t t = 0; t < tokens; ++t) {
    double& size = to.sizes[t * heads + head];
    size = std::hypot(size, from.sizes[t]);
    for (int64_t e = 0; e < dim; ++e)
      to.values[(t * heads + head) * dim + e] += from.values[t * dim + e];
  }
}

/// The convolved heads of a group, and its results for one document.
class Group {
 public:
  Group(const RecurrenceShape& shape, const RecurrenceRows& rows, const DocumentTokens& document,
        std::span<const float> weights)
      : shape_(shape), rows_(rows), document_(document), weights_(weights) {}

  RecurrenceGroupResults run(int64_t key_head, bool backward) {
    RecurrenceHead inputs;
    inputs.tokens = document_.tokens;
    const auto queries = input(0, key_head, inputs.q, inputs.q_errors);
    const auto keys = input(1, key_head, inputs.k, inputs.k_errors);
    const int64_t group = shape_.group();
    ConvolvedHead::Gradients of_values;
    for (int64_t h = 0; h < group; ++h) {
      const int64_t head = key_head * group + h;
      const auto values = input(2, head, inputs.v, inputs.v_errors);
      inputs.g = plain(Array::g, head);
      if (shape_.delta) inputs.beta = plain(Array::beta, head);
      if (backward) inputs.d_out = plain(Array::d_out, head);
      RecurrenceHeadResults of_head = recurrence_reference(shape_, inputs, backward);
      if (backward && values) {
        ConvolvedHead::Gradients gradients = values->backward(of_head.d_v);
        of_head.d_v = std::move(gradients.x);
        append(gradients, of_values.weights, of_values.weight_squares);
      }
      put(of_head, h, backward);
    }
    if (backward && queries) {
      for (const auto& [head, array] : {std::pair(&queries, Array::d_q), {&keys, Array::d_k}}) {
        ConvolvedHead::Gradients gradients = (*head)->backward(results_[array]);
        results_[array] = std::move(gradients.x);
        append(gradients, results_.d_weights, results_.d_weight_squares);
      }
      append(of_values, results_.d_weights, results_.d_weight_squares);
    }
    return std::move(results_);
  }

 private:
  using Array = RecurrenceArray;

  std::vector<double> plain(Array array, int64_t head) const {
    return head_of(shape_, rows_, array, document_, head);
  }
  /// Reads head `head` of convolved array `index`, and convolves it if there is a convolution.
  std::optional<ConvolvedHead> input(size_t index, int64_t head, std::vector<double>& values,
                                     std::vector<double>& errors) const {
    const Array array = convolved_arrays[index];
    values = plain(array, head);
    if (shape_.convolution == 0) return {};
    const int64_t dim = dim_of(shape_, array), width = shape_.convolution;
    const auto own = weights_.subspan((first_channel(shape_, index) + head * dim) * width,
                                      static_cast<size_t>(dim * width));
    ConvolvedHead convolved(std::move(values), {own.begin(), own.end()}, dim, width,
                            is_normalised(index));
    values = convolved.y();
    errors = convolved.errors();
    return convolved;
  }
  static void append(const ConvolvedHead::Gradients& from, std::vector<double>& weights,
                     std::vector<double>& squares) {
    weights.insert(weights.end(), from.weights.begin(), from.weights.end());
    squares.insert(squares.end(), from.weight_squares.begin(), from.weight_squares.end());
  }
  void put(const RecurrenceHeadResults& of_head, int64_t h, bool backward) {
    const int64_t group = shape_.group();
    const auto put_array = [&](const SizedRows& from, Array array) {
      const bool of_keys = heads_of(shape_, array) == shape_.key_heads && group > 1;
      put_head(from, document_.tokens, of_keys ? 0 : h, of_keys ? 1 : group, results_[array]);
    };
    put_array(of_head.out, Array::out);
    if (!backward) return;
    put_array(of_head.d_q, Array::d_q);
    put_array(of_head.d_k, Array::d_k);
    put_array(of_head.d_v, Array::d_v);
    put_array(of_head.d_g, Array::d_g);
    if (shape_.delta) put_array(of_head.d_beta, Array::d_beta);
  }

  const RecurrenceShape& shape_;
  const RecurrenceRows& rows_;
  DocumentTokens document_;
  std::span<const float> weights_;
  RecurrenceGroupResults results_;
};

}  // namespace

RecurrenceGroupResults reference_group(const RecurrenceShape& shape, const RecurrenceRows& rows,
                                       const DocumentTokens& document, int64_t key_head,
                                       bool backward, std::span<const float> weights) {
  return Group(shape, rows, document, weights).run(key_head, backward);
}

}  // namespace gyre
