#include "model/decoder_reference.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/dot.hpp"
#include "logprobs/reference.hpp"
#include "runtime/gemm.hpp"

namespace gyre {
namespace {

using Matrix = std::vector<double>;  // row-major

/// a [m, k] · b [k, n]
Matrix product(const Matrix& a, std::span<const float> b, size_t m, size_t k, size_t n) {
  Matrix c(m * n, 0.0);
  const int64_t rows = m, depth = k, columns = n;
  gemm(MatrixView<const double>{a.data(), rows, depth, depth}, {b.data(), depth, columns, columns},
       {c.data(), rows, columns, columns});
  return c;
}

/// a [m, k] · bᵀ, with b [n, k]. Transposes some rows of b at a time.
Matrix product_with_transpose(const Matrix& a, std::span<const float> b, size_t m, size_t k,
                              size_t n) {
  Matrix c(m * n, 0.0);
  if (m == 0) return c;
  constexpr size_t some = 256;
  std::vector<float> turned(k * some);
  const int64_t rows = m, depth = k, width = n;
  for (size_t first = 0; first < n; first += some) {
    const size_t count = std::min(some, n - first);
    const int64_t columns = count;
    for (size_t j = 0; j < count; ++j)
      for (size_t i = 0; i < k; ++i) turned[i * count + j] = b[(first + j) * k + i];
    gemm(MatrixView<const double>{a.data(), rows, depth}, {turned.data(), depth, columns},
         {&c[first], rows, columns, width});
  }
  return c;
}

Matrix rms_norm(const Matrix& x, std::span<const float> weight, double eps, size_t hidden) {
  Matrix out(x.size());
  for (size_t begin = 0; begin < x.size(); begin += hidden) {
    double squares = 0;
    for (size_t i = 0; i < hidden; ++i) squares += x[begin + i] * x[begin + i];
    const double scale = 1.0 / std::sqrt(squares / hidden + eps);
    for (size_t i = 0; i < hidden; ++i) out[begin + i] = x[begin + i] * scale * weight[i];
  }
  return out;
}

/// x [tokens, heads, dim]; the position is the row.
void rotate(Matrix& x, size_t heads, size_t dim, const Rotary& rotary) {
  const size_t half = rotary.frequencies.size();
  for (size_t row = 0; row < x.size() / dim; ++row)
    for (size_t i = 0; i < half; ++i) {
      const double angle = (row / heads) * rotary.frequencies[i];
      const double cos = rotary.scale * std::cos(angle), sin = rotary.scale * std::sin(angle);
      double& a = x[row * dim + i];
      double& b = x[row * dim + i + half];
      const double first = a * cos - b * sin;
      b = b * cos + a * sin;
      a = first;
    }
}

/// Causal softmax(q·k / sqrt(dim))·v. Query head h reads key head h / (heads / kv_heads). A query
/// sees the last `window` keys up to its own, or all of them if `window` is 0. `sinks` [heads], if
/// any, are logits of one more key of each head, whose value is 0.
Matrix attend(const ModelConfig& c, const Matrix& q, const Matrix& k, const Matrix& v,
              size_t window, std::span<const float> sinks) {
  const size_t heads = c.num_attention_heads, kv_heads = c.num_key_value_heads;
  const size_t dim = c.head_dim, tokens = q.size() / (heads * dim);
  Matrix out(q.size(), 0.0);
  std::vector<double> p(tokens);
  for (size_t t = 0; t < tokens; ++t) {
    const size_t first = window == 0 || t < window ? 0 : t + 1 - window;
    for (size_t h = 0; h < heads; ++h) {
      const size_t g = h / (heads / kv_heads);
      const double* query = &q[(t * heads + h) * dim];
      double top = sinks.empty() ? -INFINITY : sinks[h], sum = 0;
      for (size_t j = first; j <= t; ++j) {
        p[j] = dot(query, &k[(j * kv_heads + g) * dim], dim) / std::sqrt(dim);
        top = std::max(top, p[j]);
      }
      if (!sinks.empty()) sum = std::exp(sinks[h] - top);
      for (size_t j = first; j <= t; ++j) sum += p[j] = std::exp(p[j] - top);
      for (size_t j = first; j <= t; ++j)
        add_scaled(&out[(t * heads + h) * dim], p[j] / sum, &v[(j * kv_heads + g) * dim], dim);
    }
  }
  return out;
}

void add(Matrix& x, const Matrix& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

void add_to_rows(Matrix& x, std::span<const float> bias) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += bias[i % bias.size()];
}

/// The weights of one layer.
using LayerWeights = std::function<std::span<const float>(Weight)>;

Matrix attention(const ModelConfig& c, const LayerWeights& weights, const LayerKind& kind,
                 size_t tokens, const Matrix& h) {
  const size_t hidden = c.hidden_size, q_width = c.query_width(), kv_width = c.kv_width();
  const size_t heads = c.num_attention_heads, kv_heads = c.num_key_value_heads;
  const size_t dim = c.head_dim;
  Matrix q = product(h, weights(Weight::wq), tokens, hidden, q_width);
  Matrix k = product(h, weights(Weight::wk), tokens, hidden, kv_width);
  Matrix v = product(h, weights(Weight::wv), tokens, hidden, kv_width);
  if (c.qkv_bias) {
    add_to_rows(q, weights(Weight::bq));
    add_to_rows(k, weights(Weight::bk));
    add_to_rows(v, weights(Weight::bv));
  }
  if (c.qk_norm) {
    q = rms_norm(q, weights(Weight::q_norm), c.rms_norm_eps, dim);
    k = rms_norm(k, weights(Weight::k_norm), c.rms_norm_eps, dim);
  }
  if (kind.rotary) {
    const Rotary rotary = rotary_of(c);
    rotate(q, heads, dim, rotary);
    rotate(k, kv_heads, dim, rotary);
  }
  const std::span<const float> sinks =
      c.attention_sinks ? weights(Weight::sinks) : std::span<const float>();
  Matrix mixed = attend(c, q, k, v, kind.window, sinks);
  if (c.output_gate) {
    const Matrix gate = product(h, weights(Weight::wz), tokens, hidden, q_width);
    for (size_t i = 0; i < mixed.size(); ++i) mixed[i] /= 1 + std::exp(-gate[i]);
  }
  Matrix out = product(mixed, weights(Weight::wo), tokens, q_width, hidden);
  if (c.output_bias) add_to_rows(out, weights(Weight::bo));
  return out;
}

double silu(double x) {
  return x / (1 + std::exp(-x));
}

/// silu of the causal convolution of each column of x [tokens, columns] with weight [width,
/// columns].
Matrix convolved(const Matrix& x, std::span<const float> weight, size_t columns) {
  const size_t width = weight.size() / columns;
  Matrix y(x.size(), 0.0);
  for (size_t at = 0; at < x.size(); ++at) {
    const size_t token = at / columns, column = at % columns;
    for (size_t back = 0; back < width && back <= token; ++back)
      y[at] += weight[(width - 1 - back) * columns + column] * x[at - back * columns];
    y[at] = silu(y[at]);
  }
  return y;
}

/// Heads of x with length 1.
Matrix units(Matrix x, size_t dim) {
  for (size_t begin = 0; begin < x.size(); begin += dim) {
    double squares = 0;
    for (size_t i = 0; i < dim; ++i) squares += x[begin + i] * x[begin + i];
    for (size_t i = 0; i < dim; ++i) x[begin + i] /= std::sqrt(squares + 1e-6);
  }
  return x;
}

/// The gated delta rule, token by token: S <- decay S; S <- S + k (beta (v - Sᵀ k))ᵀ; out = Sᵀ q.
Matrix delta_rule(const RecurrentConfig& r, const Matrix& q, const Matrix& k, const Matrix& v,
                  const Matrix& decay, const Matrix& beta) {
  const size_t heads = r.value_heads, keys = r.key_dim, values = r.value_dim;
  const size_t key_heads = r.key_heads, group = heads / key_heads;
  Matrix out(v.size(), 0.0), state(heads * keys * values, 0.0);
  for (size_t row = 0; row < v.size() / values; ++row) {
    const size_t token = row / heads, head = row % heads;
    const size_t key_row = (token * key_heads + head / group) * keys;
    double* s = &state[head * keys * values];
    for (size_t j = 0; j < values; ++j) {
      double held = 0;
      for (size_t i = 0; i < keys; ++i) held += (s[i * values + j] *= decay[row]) * k[key_row + i];
      const double change = beta[row] * (v[row * values + j] - held);
      for (size_t i = 0; i < keys; ++i) {
        s[i * values + j] += k[key_row + i] * change;
        out[row * values + j] += s[i * values + j] * q[key_row + i] / std::sqrt(keys);
      }
    }
  }
  return out;
}

/// A recurrent layer in place of attention.
Matrix recurrence(const ModelConfig& c, const LayerWeights& weights, size_t tokens,
                  const Matrix& h) {
  const RecurrentConfig& r = c.recurrent;
  const size_t hidden = c.hidden_size, keys = r.key_width(), values = r.value_width();
  const size_t heads = r.value_heads;
  const auto projected = [&](Weight weight, size_t columns) {
    return product(h, weights(weight), tokens, hidden, columns);
  };
  const Matrix q = convolved(projected(Weight::wq, keys), weights(Weight::conv_q), keys);
  const Matrix k = convolved(projected(Weight::wk, keys), weights(Weight::conv_k), keys);
  const Matrix v = convolved(projected(Weight::wv, values), weights(Weight::conv_v), values);
  const Matrix z = projected(Weight::wz, values);
  Matrix beta = projected(Weight::wb, heads), decay = projected(Weight::wa, heads);
  for (double& x : beta) x = 1 / (1 + std::exp(-x));
  for (size_t i = 0; i < decay.size(); ++i) {
    const double x = decay[i] + weights(Weight::dt_bias)[i % heads];
    const double softplus = std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
    decay[i] =
        std::exp(-std::exp(static_cast<double>(weights(Weight::a_log)[i % heads])) * softplus);
  }
  const size_t dim = r.key_dim;
  Matrix out = rms_norm(delta_rule(r, units(q, dim), units(k, dim), v, decay, beta),
                        weights(Weight::o_norm), c.rms_norm_eps, r.value_dim);
  for (size_t i = 0; i < out.size(); ++i) out[i] *= silu(z[i]);
  return product(out, weights(Weight::wo), tokens, values, hidden);
}

double activated(GateActivation activation, double x) {
  if (activation == GateActivation::silu) return silu(x);
  if (activation == GateActivation::gelu) return x / 2 * (1 + std::erf(x / std::sqrt(2)));
  return x / 2 * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}

void apply_layer(const ModelConfig& c, const LayerWeights& weights, const LayerKind& kind,
                 size_t tokens, Matrix& x) {
  const size_t hidden = c.hidden_size, inner = c.intermediate_size;
  const Matrix mixed = rms_norm(x, weights(Weight::attn_norm), c.rms_norm_eps, hidden);
  add(x, kind.recurrent ? recurrence(c, weights, tokens, mixed)
                        : attention(c, weights, kind, tokens, mixed));
  const Matrix h = rms_norm(x, weights(Weight::mlp_norm), c.rms_norm_eps, hidden);
  Matrix gate = product(h, weights(Weight::w_gate), tokens, hidden, inner);
  const Matrix up = product(h, weights(Weight::w_up), tokens, hidden, inner);
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = activated(c.hidden_act, gate[i]) * up[i];
  add(x, product(gate, weights(Weight::w_down), tokens, inner, hidden));
}

/// The logits [vocab_size] after one token.
std::span<const double> logits_of(const ModelConfig& c, std::span<const double> logits,
                                  size_t token) {
  const size_t padded = c.vocab_padded, vocab = c.vocab_size;
  return logits.subspan(token * padded, vocab);
}

}  // namespace

std::vector<double> logits_reference(
    const ModelConfig& c, const DecoderWeights& weights, std::span<const int32_t> document,
    const std::function<void(int64_t index, std::span<const double> x)>& observe) {
  const size_t tokens = document.size(), hidden = c.hidden_size;
  const std::span<const float> embed = weights.of(Weight::embed).values();
  Matrix x;
  for (int32_t token : document)
    for (size_t i = 0; i < hidden; ++i) x.push_back(embed[token * c.hidden_size + i]);
  if (observe) observe(0, x);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const auto of_layer = [&](Weight weight) { return weights.of(weight, l + 1).values(); };
    apply_layer(c, of_layer, c.kind_of(l), tokens, x);
    if (observe) observe(l + 1, x);
  }
  Matrix logits = product_with_transpose(
      rms_norm(x, weights.of(Weight::final_norm).values(), c.rms_norm_eps, hidden),
      weights.of(c.tied_head ? Weight::embed : Weight::head).values(), tokens, hidden,
      c.vocab_padded);
  if (const double cap = c.final_soft_cap; cap > 0)
    for (double& z : logits) z = cap * std::tanh(z / cap);
  return logits;
}

ReferenceScores scores_reference(const ModelConfig& c, std::span<const double> logits,
                                 std::span<const int32_t> document) {
  ReferenceScores scores;
  for (size_t t = 0; t + 1 < document.size(); ++t) {
    const TokenScore score = score_row_reference(logits_of(c, logits, t), document[t + 1]);
    scores.logprob.push_back(score.logprob);
    scores.entropy.push_back(score.entropy);
  }
  return scores;
}

void add_divergences_reference(const ModelConfig& student, std::span<const double> student_logits,
                               const ModelConfig& teacher, std::span<const double> teacher_logits,
                               ReferenceScores& scores) {
  for (size_t t = 0; t < scores.logprob.size(); ++t) {
    const Matrix log_q = log_softmax_reference(logits_of(student, student_logits, t)),
                 log_p = log_softmax_reference(logits_of(teacher, teacher_logits, t));
    double kl = 0, distance = 0, deviation = 0;
    for (size_t v = 0; v < log_p.size(); ++v) {
      kl += std::exp(log_p[v]) * (log_p[v] - log_q[v]);
      distance += std::abs(std::exp(log_p[v]) - std::exp(log_q[v]));
    }
    for (size_t v = 0; v < log_p.size(); ++v)
      deviation += std::exp(log_p[v]) * std::abs(log_p[v] - log_q[v] - kl);
    scores.kl.push_back(kl);
    scores.distance.push_back(distance);
    scores.deviation.push_back(deviation);
  }
}

}  // namespace gyre
