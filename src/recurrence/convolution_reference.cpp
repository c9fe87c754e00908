#include "recurrence/convolution_reference.hpp"

#include <cmath>

#include "recurrence/convolution.hpp"

namespace gyre {
namespace {

double sigmoid(double z) {
  return 1 / (1 + std::exp(-z));
}
double silu_slope(double z) {
  return sigmoid(z) * (1 + z * (1 - sigmoid(z)));
}
double silu_curvature(double z) {
  const double s = sigmoid(z);
  return s * (1 - s) * (2 + z * (1 - 2 * s));
}
double squared(double x) {
  return x * x;
}

}  // namespace

ConvolvedHead::ConvolvedHead(std::vector<double> x, std::vector<double> weights, int64_t dim,
                             int64_t width, bool normalised)
    : x_(std::move(x)),
      weights_(std::move(weights)),
      dim_(dim),
      width_(width),
      normalised_(normalised),
      y_(x_.size()),
      errors_(x_.size()),
      factors_(tokens(), 1.0),
      factor_errors_(tokens(), 0.0) {
  for (int64_t t = 0; t < tokens(); ++t) {
    double* const y = y_.data() + t * dim;
    double* const errors = errors_.data() + t * dim;
    double squares = convolution_epsilon, spread = 0;
    for (int64_t c = 0; c < dim; ++c) {
      const Term z = sum(t, c);
      y[c] = z.value * sigmoid(z.value);
      errors[c] = squared(y[c]) + squared(silu_slope(z.value)) * z.square;
      squares += squared(y[c]);
      spread += squared(y[c]) * errors[c];
    }
    if (!normalised) continue;
    factors_[t] = 1 / std::sqrt(squares);
    factor_errors_[t] = 1 + spread / squared(squares);
    for (int64_t c = 0; c < dim; ++c) {
      y[c] *= factors_[t];
      errors[c] = errors[c] * squared(factors_[t]) + squared(y[c]) * factor_errors_[t];
    }
  }
}

ConvolvedHead::Term ConvolvedHead::sum(int64_t t, int64_t c) const {
  Term z;
  for (int64_t j = 0; j < width_; ++j) {
    const int64_t from = t - width_ + 1 + j;
    if (from < 0) continue;
    const double product = weights_[c * width_ + j] * x_[from * dim_ + c];
    z.value += product;
    z.square += squared(product);
  }
  return z;
}

std::vector<ConvolvedHead::Term> ConvolvedHead::slopes(const SizedRows& d_y, int64_t t) const {
  const double* const d = d_y.values.data() + t * dim_;
  const double* const y = y_.data() + t * dim_;
  const double* const errors = errors_.data() + t * dim_;
  const double error = squared(d_y.sizes[t]);
  Term along;  // <y, d_y>
  for (int64_t c = 0; normalised_ && c < dim_; ++c) {
    along.value += y[c] * d[c];
    along.square += squared(y[c]) * (squared(d[c]) + error) + errors[c] * squared(d[c]);
  }
  std::vector<Term> slopes(dim_);
  for (int64_t c = 0; c < dim_; ++c) {
    const Term z = sum(t, c);
    double value = d[c], squares = error;
    if (normalised_) {
      value = factors_[t] * (d[c] - y[c] * along.value);
      squares = squared(factors_[t]) *
                    (error + squared(d[c]) + squared(y[c]) * (squared(along.value) + along.square) +
                     errors[c] * squared(along.value)) +
                squared(value) * factor_errors_[t];
    }
    const double slope = silu_slope(z.value);
    slopes[c] = {value * slope, (squares + squared(value)) * squared(slope) +
                                    squared(value * silu_curvature(z.value)) * z.square};
  }
  return slopes;
}

ConvolvedHead::Gradients ConvolvedHead::backward(const SizedRows& d_y) const {
  Gradients to;
  to.x.values.assign(x_.size(), 0.0);
  to.x.sizes.assign(tokens(), 0.0);
  to.weights.assign(dim_ * width_, 0.0);
  to.weight_squares = to.weights;
  for (int64_t t = 0; t < tokens(); ++t) {
    const std::vector<Term> d_z = slopes(d_y, t);
    for (int64_t j = 0; j < width_; ++j) {
      const int64_t from = t - width_ + 1 + j;
      for (int64_t c = 0; from >= 0 && c < dim_; ++c) {
        const double weight = weights_[c * width_ + j], x = x_[from * dim_ + c];
        to.x.values[from * dim_ + c] += weight * d_z[c].value;
        to.x.sizes[from] += squared(weight) * (squared(d_z[c].value) + d_z[c].square);
        to.weights[c * width_ + j] += x * d_z[c].value;
        to.weight_squares[c * width_ + j] += squared(x) * (squared(d_z[c].value) + d_z[c].square);
      }
    }
  }
  for (double& size : to.x.sizes) size = std::sqrt(size / static_cast<double>(dim_));
  return to;
}

}  // namespace gyre
