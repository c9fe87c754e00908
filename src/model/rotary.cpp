#include "model/rotary.hpp"

#include <algorithm>
#include <cmath>

#include "model/elementwise_math.hpp"

namespace gyre {
namespace {

double llama3_frequency(double frequency, const RopeScaling& s) {
  const double turns = s.original_max_position_embeddings * frequency / full_turn;
  if (turns > s.high_freq_factor) return frequency;
  if (turns < s.low_freq_factor) return frequency / s.factor;
  const double share = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  return frequency * (share + (1 - share) / s.factor);
}

/// YaRN's ramp: 0 up to `first`, 1 from `last` on.
struct Ramp {
  double first, last;
  double at(int64_t pair) const { return std::clamp((pair - first) / (last - first), 0.0, 1.0); }
};

Ramp yarn_ramp(int64_t dim, double theta, const RopeScaling& s) {
  const auto pair_of_turns = [&](double turns) {
    return dim * std::log(s.original_max_position_embeddings / (turns * full_turn)) /
           (2 * std::log(theta));
  };
  double first = pair_of_turns(s.beta_fast), last = pair_of_turns(s.beta_slow);
  if (s.truncate) {
    first = std::floor(first);
    last = std::ceil(last);
  }
  first = std::max(first, 0.0);
  last = std::min(last, static_cast<double>(dim - 1));
  return {first, last == first ? last + 0.001 : last};
}

}  // namespace

Rotary plain_rotary(int64_t dim, double theta) {
  Rotary rotary{dim, {}};
  for (int64_t i = 0; i < dim / 2; ++i)
    rotary.frequencies.push_back(std::pow(theta, -2.0 * i / dim));
  return rotary;
}

Rotary rotary_of(const ModelConfig& config) {
  const RopeScaling& s = config.rope_scaling;
  Rotary rotary = plain_rotary(config.rotary_width(), config.rope_theta);
  if (s.type == RopeType::yarn) rotary.scale = s.attention_factor;
  const Ramp ramp = s.type == RopeType::yarn ? yarn_ramp(rotary.dim, config.rope_theta, s) : Ramp{};
  for (int64_t i = 0; i < rotary.dim / 2; ++i) {
    double& frequency = rotary.frequencies[i];
    switch (s.type) {
      case RopeType::plain:
        break;
      case RopeType::linear:
        frequency /= s.factor;
        break;
      case RopeType::llama3:
        frequency = llama3_frequency(frequency, s);
        break;
      case RopeType::yarn:
        frequency *= 1 - ramp.at(i) + ramp.at(i) / s.factor;
        break;
      case RopeType::divided:
        frequency /= s.divisors[i];
        break;
    }
  }
  return rotary;
}

}  // namespace gyre
