#include "logprobs/tolerance.hpp"

#include <algorithm>
#include <cmath>

namespace gyre {

double logprob_tolerance() {
  return tolerance_for(DType::f32, row_roundings);
}

double logprob_scale(double logprob) {
  return std::sqrt(1 + 4 * logprob * logprob / row_roundings);
}

double entropy_scale(int64_t vocab_size) {
  return std::max(1.0, std::log(vocab_size));
}

double divergence_scale(double log_q, double log_p, bool sampled) {
  if (log_q == -HUGE_VAL) return 0;
  const double own = logprob_scale(log_q), other = logprob_scale(log_p);
  return sampled ? own + other : std::exp(log_q) * (own * (2 + std::abs(log_q - log_p)) + other);
}

double logit_gradient_tolerance(DType stored) {
  return mixed_tolerance(row_roundings, stored == DType::bf16 ? 1 : 0);
}

double logit_gradient_scale(double logprob, double a, double b, double weights) {
  constexpr double smallest = 0x1p-80;
  if (!std::isfinite(logprob)) return std::max(smallest, weights);
  const double size = std::abs(logprob), p = std::exp(logprob);
  // f32 flushes a p below its smallest normal number to 0: all of the term may be lost.
  const double lost = p < 0x1p-126 ? p / logprob_tolerance() : 0;
  const double error = p * (1 + size) + lost;
  return std::max(smallest, error * (std::abs(a) + std::abs(b) * std::max(1.0, size)) + weights);
}

double linear_logprob_tolerance(int64_t hidden, double logit_size) {
  return tolerance_for(DType::f32, hidden) * std::max(1.0, logit_size) + logprob_tolerance();
}

double linear_gradient_tolerance(int64_t hidden, int64_t terms, double logit_size) {
  return linear_logprob_tolerance(hidden, logit_size) + tolerance_for(DType::f32, terms);
}

}  // namespace gyre
