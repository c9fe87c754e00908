#pragma once
// Angles of a rotary embedding. Pair i of a head, i < dim / 2, consists of elements i and i + dim/2
// and turns by position · frequencies[i]; elements from dim on do not turn.
//
//     plain     f_i = theta^(-2i / dim)
//     linear    f_i / factor
//     divided   f_i / divisors[i]
//     llama3    by the turns t_i = original · f_i / 2π of a pair in the original context:
//               f_i            above high_freq_factor turns
//               f_i / factor   below low_freq_factor turns
//               between them   f_i · (s + (1 - s) / factor),  s = (t_i - low) / (high - low)
//     yarn      f_i · (1 - r + r / factor),  r = clamp((i - first) / (last - first), 0, 1);
//               pair `first` makes beta_fast turns in the original context, pair `last` beta_slow;
//               `truncate` rounds first down and last up; attention_factor multiplies cos and sin
//
// The formulas are Hugging Face's (modeling_rope_utils.py), except `divided`, which is llama.cpp's.
// They are evaluated in double precision.

#include <cstdint>
#include <vector>

#include "core/model_config.hpp"

namespace gyre {

struct Rotary {
  int64_t dim = 0;                  ///< elements of a head that turn
  std::vector<double> frequencies;  ///< [dim / 2], radians per position
  double scale = 1;                 ///< factor of cos and sin
  friend bool operator==(const Rotary&, const Rotary&) = default;
};

/// theta^(-2i / dim), unscaled.
Rotary plain_rotary(int64_t dim, double theta);

/// `config` must have passed check_config().
Rotary rotary_of(const ModelConfig& config);

}  // namespace gyre
