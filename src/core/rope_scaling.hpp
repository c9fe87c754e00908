#pragma once
// How a model stretches its rotary embedding beyond the context that it was trained on. Names are
// those of Hugging Face's rope_scaling; model/rotary.hpp has the formulas.

#include <cstdint>
#include <vector>

namespace gyre {

enum class RopeType {
  plain,    ///< angles as rope_theta says
  linear,   ///< all angles divided by `factor`
  llama3,   ///< slow pairs divided by `factor`, with a ramp between two wavelengths (Llama 3.1)
  yarn,     ///< slow pairs divided by `factor`, with a ramp over pairs (arXiv 2309.00071)
  divided,  ///< angle of pair i divided by `divisors[i]` (rope_freqs.weight of GGUF)
};

struct RopeScaling {
  RopeType type = RopeType::plain;
  double factor = 1;
  int64_t original_max_position_embeddings = 0;      ///< llama3, yarn
  double low_freq_factor = 1, high_freq_factor = 4;  ///< llama3
  double beta_fast = 32, beta_slow = 1;              ///< yarn: rotations at the ends of the ramp
  bool truncate = true;               ///< yarn: the ramp begins and ends at whole pairs
  double attention_factor = 1;        ///< yarn: multiplies cos and sin
  std::vector<double> divisors = {};  ///< divided: [rotary_width() / 2]
  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
};

}  // namespace gyre
