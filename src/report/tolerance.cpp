#include "report/tolerance.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.hpp"

namespace gyre {

double epsilon_of(DType type) {
  switch (type) {
    case DType::f32:
      return std::numeric_limits<float>::epsilon();
    case DType::f64:
      return std::numeric_limits<double>::epsilon();
    case DType::i32:
    case DType::i64:
      return 0;
  }
  return 0;
}

double tolerance_for(DType type, int64_t roundings) {
  GYRE_CHECK(roundings >= 0, "{} roundings", roundings);
  const double sigma = epsilon_of(type) / 6 * std::sqrt(static_cast<double>(roundings));
  return tolerance_safety * sigma;
}

double attention_tolerance(int64_t head_dim, int64_t keys, int64_t merges) {
  return tolerance_for(DType::f32, head_dim + keys + roundings_per_merge * merges + 1);
}

int64_t roundings_per_layer(const DecoderShape& shape) {
  const int64_t norms = 2 * shape.hidden;
  const int64_t projections = 2 * shape.hidden;  // to Q, K, V and to gate and up
  const int64_t attention =
      shape.head_dim + shape.longest_document + roundings_per_merge * shape.merges;
  return norms + projections + attention + shape.attention_width + shape.intermediate + 1;
}

double hidden_tolerance(const DecoderShape& shape) {
  return tolerance_for(DType::f32, shape.layers * roundings_per_layer(shape));
}

double score_tolerance(const DecoderShape& shape, double max_abs_logit) {
  const int64_t behind_layers =
      2 * shape.hidden + shape.vocab;  // norm, logits, sum over the vocabulary
  const int64_t roundings = shape.layers * roundings_per_layer(shape) + behind_layers;
  const double expected_max =
      std::sqrt(2 * std::log(static_cast<double>(std::max<int64_t>(2, shape.vocab))));
  const double size = std::max(1.0, std::abs(max_abs_logit) / expected_max);
  return size * tolerance_for(DType::f32, roundings);
}

}  // namespace gyre
