#include "model/elementwise.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "model/elementwise.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "core/error.hpp"
#include "core/index.hpp"
#include "model/elementwise_math.hpp"
#include "runtime/exp-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace gyre::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
constexpr int64_t max_lanes = HWY_MAX_BYTES / sizeof(float);

/// Loads the first `count` elements and pads with zeros.
HWY_INLINE V load_tail(F f, const float* from, int64_t count) {
  HWY_ALIGN float padded[max_lanes] = {};
  std::memcpy(padded, from, count * sizeof(float));
  return hn::Load(f, padded);
}

HWY_INLINE void store_tail(F f, V v, float* to, int64_t count) {
  HWY_ALIGN float padded[max_lanes];
  hn::Store(v, f, padded);
  std::memcpy(to, padded, count * sizeof(float));
}

/// out[i] = op(a[i], b[i])
template <class Op>
HWY_INLINE void transform(const float* a, const float* b, float* out, int64_t count, Op op) {
  const F f;
  const int64_t n = hn::Lanes(f);
  int64_t i = 0;
  for (; i + n <= count; i += n)
    hn::StoreU(op(hn::LoadU(f, a + i), hn::LoadU(f, b + i)), f, out + i);
  const int64_t rest = count - i;
  if (rest > 0)
    store_tail(f, op(load_tail(f, a + i, rest), load_tail(f, b + i, rest)), out + i, rest);
}

float sum_of_squares(const float* x, int64_t count) {
  const F f;
  const int64_t n = hn::Lanes(f);
  V a = hn::Zero(f), b = a, c = a, d = a;
  const auto square = [&](int64_t at, V sum) HWY_ATTR {
    const V v = hn::LoadU(f, x + at);
    return hn::MulAdd(v, v, sum);
  };
  int64_t i = 0;
  for (; i + 4 * n <= count; i += 4 * n) {
    a = square(i, a);
    b = square(i + n, b);
    c = square(i + 2 * n, c);
    d = square(i + 3 * n, d);
  }
  for (; i + n <= count; i += n) a = square(i, a);
  if (i < count) {
    const V v = load_tail(f, x + i, count - i);
    b = hn::MulAdd(v, v, b);
  }
  return hn::GetLane(hn::SumOfLanes(f, hn::Add(hn::Add(a, b), hn::Add(c, d))));
}

void rms_norm_row(const float* x, const float* weight, float eps, float* out, int64_t count) {
  const F f;
  const float mean = sum_of_squares(x, count) / static_cast<float>(count);
  const V scale = hn::Set(f, 1.0F / std::sqrt(mean + eps));
  transform(x, weight, out, count,
            [&](V v, V w) HWY_ATTR { return hn::Mul(hn::Mul(v, scale), w); });
}

/// x · sigmoid(s), see elementwise_math.hpp.
HWY_INLINE V times_sigmoid(F f, V x, V s) {
  const V one = hn::Set(f, 1.0F);
  const V e = exp_f32(f, hn::Neg(hn::Abs(s)));
  const V numerator = hn::IfThenElse(hn::Lt(s, hn::Zero(f)), e, one);
  return hn::Mul(x, hn::Div(numerator, hn::Add(one, e)));
}

HWY_INLINE V gelu_tanh(F f, V x) {
  const V factor =
      hn::MulAdd(hn::Mul(x, x), hn::Set(f, gelu_tanh_third), hn::Set(f, gelu_tanh_first));
  return times_sigmoid(f, x, hn::Mul(x, factor));
}

/// x · Φ(x). Φ(x) is h for x < 0 and 1 - h for x >= 0, where h = Φ(-|x|) = exp(-x²/2) · t · q(t)
/// and t = 1 / (1 + 0.34 |x|). q is a minimax polynomial (relative error 3e-8 for |x| < 14, beyond
/// which h is 0 in f32).
HWY_INLINE V gelu(F f, V x) {
  const V one = hn::Set(f, 1.0F);
  const V t = hn::Div(one, hn::MulAdd(hn::Abs(x), hn::Set(f, 0.34F), one));
  constexpr float coefficients[] = {1.35620505e-1F,  1.36112198e-1F,  1.15197651e-1F,
                                    1.15359195e-1F,  -4.47185412e-2F, 2.02182814e-1F,
                                    -2.73132890e-1F, 1.39499575e-1F,  -2.61204913e-2F};
  V q = hn::Zero(f);
  for (int i = 8; i >= 0; --i) q = hn::MulAdd(q, t, hn::Set(f, coefficients[i]));
  const V e = exp_f32(f, hn::Mul(hn::Mul(x, x), hn::Set(f, -0.5F)));
  const V h = hn::Mul(hn::Mul(e, t), q);
  return hn::Mul(x, hn::IfThenElse(hn::Lt(x, hn::Zero(f)), h, hn::Sub(one, h)));
}

void gate_multiply_row(GateActivation activation, const float* gate, const float* up, float* out,
                       int64_t count) {
  const F f;
  switch (activation) {
    case GateActivation::silu:
      return transform(gate, up, out, count,
                       [&](V g, V u) HWY_ATTR { return hn::Mul(times_sigmoid(f, g, g), u); });
    case GateActivation::gelu:
      return transform(gate, up, out, count,
                       [&](V g, V u) HWY_ATTR { return hn::Mul(gelu(f, g), u); });
    case GateActivation::gelu_tanh:
      return transform(gate, up, out, count,
                       [&](V g, V u) HWY_ATTR { return hn::Mul(gelu_tanh(f, g), u); });
    case GateActivation::sigmoid:
      return transform(gate, up, out, count,
                       [&](V g, V u) HWY_ATTR { return times_sigmoid(f, u, g); });
  }
}

/// cos and sin of a + b from those of a and b, computed in double and rounded to float. Arrays are
/// padded to whole vectors.
void add_angles(const double* cos_a, const double* sin_a, const double* cos_b, const double* sin_b,
                int64_t count, float* cos_out, float* sin_out) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> narrow;
  for (int64_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto ca = hn::LoadU(d, cos_a + i), sa = hn::LoadU(d, sin_a + i);
    const auto cb = hn::LoadU(d, cos_b + i), sb = hn::LoadU(d, sin_b + i);
    const auto c = hn::NegMulAdd(sa, sb, hn::Mul(ca, cb));
    const auto s = hn::MulAdd(sa, cb, hn::Mul(ca, sb));
    hn::StoreU(hn::DemoteTo(narrow, c), narrow, cos_out + i);
    hn::StoreU(hn::DemoteTo(narrow, s), narrow, sin_out + i);
  }
}

/// Rotates the pairs (x[i], x[i + half]) of every head of one row.
void rotate_row(float* x, int64_t heads, int64_t head_dim, int64_t half, const float* cos,
                const float* sin) {
  const F f;
  const int64_t n = hn::Lanes(f);
  for (int64_t h = 0; h < heads; ++h) {
    float* low = x + h * head_dim;
    float* high = low + half;
    int64_t i = 0;
    for (; i + n <= half; i += n) {
      const V a = hn::LoadU(f, low + i), b = hn::LoadU(f, high + i);
      const V c = hn::LoadU(f, cos + i), s = hn::LoadU(f, sin + i);
      hn::StoreU(hn::NegMulAdd(b, s, hn::Mul(a, c)), f, low + i);
      hn::StoreU(hn::MulAdd(a, s, hn::Mul(b, c)), f, high + i);
    }
    for (; i < half; ++i) {
      const float a = low[i], b = high[i];
      low[i] = a * cos[i] - b * sin[i];
      high[i] = b * cos[i] + a * sin[i];
    }
  }
}

}  // namespace
}  // namespace gyre::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gyre {
namespace {
HWY_EXPORT(rms_norm_row);
HWY_EXPORT(gate_multiply_row);
HWY_EXPORT(add_angles);
HWY_EXPORT(rotate_row);

/// scale·cos and scale·sin of p·frequencies[i] for any position p, from two small tables by the
/// addition theorem: p = 256·high + low. A table of all positions would cost a sincos per position
/// and pair, and tens of megabytes for long contexts.
class Angles {
 public:
  /// Keeps the tables of the previous call if the arguments are the same.
  void prepare(const Rotary& rotary) {
    if (rotary == rotary_) return;
    rotary_ = rotary;
    constexpr int64_t widest_vector = 8;  // doubles of any target (HWY_MAX_BYTES: one)
    stride_ = round_up(rotary.dim / 2, widest_vector);
    low_ = {};
    high_ = {};
    for (int64_t i = 0; i < steps; ++i) append(low_, i, rotary.scale);
    row_cos_.assign(stride_, 0.0F);
    row_sin_.assign(stride_, 0.0F);
  }

  /// Sets row_cos() and row_sin() to the values at `position`.
  void move_to(int64_t position) {
    const int64_t high = position / steps, low = position % steps;
    while (high_.rows <= high) append(high_, high_.rows * steps, 1);
    HWY_DYNAMIC_DISPATCH(add_angles)
    (high_.cos.data() + high * stride_, high_.sin.data() + high * stride_,
     low_.cos.data() + low * stride_, low_.sin.data() + low * stride_, stride_, row_cos_.data(),
     row_sin_.data());
  }

  const float* row_cos() const { return row_cos_.data(); }
  const float* row_sin() const { return row_sin_.data(); }

 private:
  static constexpr int64_t steps = 256;
  struct Table {
    std::vector<double> cos, sin;  // [rows, stride_]
    int64_t rows = 0;
  };

  void append(Table& table, int64_t position, double scale) {
    for (int64_t i = 0; i < stride_; ++i) {
      const double angle = i < rotary_.dim / 2 ? position * rotary_.frequencies[i] : 0;
      table.cos.push_back(scale * std::cos(angle));
      table.sin.push_back(scale * std::sin(angle));
    }
    ++table.rows;
  }

  Rotary rotary_;
  int64_t stride_ = 0;
  Table low_, high_;
  std::vector<float> row_cos_, row_sin_;
};

void check_same_shape(MatrixView<const float> a, MatrixView<const float> b) {
  GYRE_CHECK(a.rows == b.rows && a.cols == b.cols, "[{}, {}] and [{}, {}]", a.rows, a.cols, b.rows,
             b.cols);
}

}  // namespace

void rms_norm(MatrixView<const float> x, std::span<const float> weight, float eps,
              MatrixView<float> out) {
  check_same_shape(x, out);
  GYRE_CHECK(std::ssize(weight) == x.cols, "{} weights for {} columns", weight.size(), x.cols);
  const auto norm = HWY_DYNAMIC_DISPATCH(rms_norm_row);
  for (int64_t r = 0; r < x.rows; ++r) norm(x.row(r), weight.data(), eps, out.row(r), x.cols);
}

void apply_rope(MatrixView<float> x, int64_t head_dim, const Rotary& rotary,
                std::span<const int32_t> positions) {
  GYRE_CHECK(head_dim > 0 && x.cols % head_dim == 0, "{} columns in heads of {}", x.cols, head_dim);
  GYRE_CHECK(rotary.dim % 2 == 0 && rotary.dim <= head_dim, "{} of {} elements turn", rotary.dim,
             head_dim);
  GYRE_CHECK(std::ssize(positions) == x.rows, "{} positions for {} rows", positions.size(), x.rows);
  thread_local Angles angles;
  angles.prepare(rotary);
  const auto rotate = HWY_DYNAMIC_DISPATCH(rotate_row);
  int64_t last = -1;
  for (int64_t r = 0; r < x.rows; ++r) {
    const int64_t position = positions[r];
    GYRE_CHECK(position >= 0, "position {} of row {}", position, r);
    if (position != last) angles.move_to(position);
    last = position;
    rotate(x.row(r), x.cols / head_dim, head_dim, rotary.dim / 2, angles.row_cos(),
           angles.row_sin());
  }
}

void gate_multiply(GateActivation activation, MatrixView<const float> gate,
                   MatrixView<const float> up, MatrixView<float> out) {
  check_same_shape(gate, up);
  check_same_shape(gate, out);
  const auto multiply = HWY_DYNAMIC_DISPATCH(gate_multiply_row);
  for (int64_t r = 0; r < gate.rows; ++r)
    multiply(activation, gate.row(r), up.row(r), out.row(r), gate.cols);
}

}  // namespace gyre
#endif  // HWY_ONCE
