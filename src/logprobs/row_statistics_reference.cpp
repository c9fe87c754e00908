#include <algorithm>
#include <cmath>
#include <limits>

#include "logprobs/row_statistics.hpp"

namespace gyre {

/// A target outside the row scores 0. A row of -inf only is no distribution: its entropy is NaN.
TokenScore score_row_reference(std::span<const double> logits, int64_t target) {
  constexpr double minus_infinity = -std::numeric_limits<double>::infinity();
  double max = minus_infinity;
  for (const double z : logits) max = std::max(max, z);
  double sum = 0, weighted = 0;
  for (const double z : logits) {
    if (z == minus_infinity) continue;
    sum += std::exp(z - max);
    weighted += (z - max) * std::exp(z - max);
  }
  TokenScore score;
  score.entropy = std::log(sum) - weighted / sum;
  if (target >= 0 && target < std::ssize(logits))
    score.logprob = (logits[static_cast<size_t>(target)] - max) - std::log(sum);
  return score;
}

}  // namespace gyre
