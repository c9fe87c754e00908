#include "model/tolerance.hpp"

#include <algorithm>
#include <cmath>

#include "logprobs/tolerance.hpp"
#include "recurrence/kind.hpp"

namespace gyre {

namespace {

/// Convolution, lengths of keys, states (recurrence/tolerance.hpp), norm and output projection.
int64_t recurrence_roundings(const ModelConfig& config, int64_t tokens, int64_t maps) {
  if (config.recurrent_layers() == 0) return 0;
  const RecurrentConfig& r = config.recurrent;
  const int64_t state = 2 * (r.key_dim + recurrence_chunk) + tokens + maps * r.key_dim + 1;
  const int64_t out = state + r.key_dim + recurrence_chunk;
  return r.conv_width + r.key_dim + out + r.value_dim + r.value_width();
}

}  // namespace

DecoderShape decoder_shape(const ModelConfig& config, int64_t layers, int64_t longest_document,
                           int64_t merges) {
  return {.layers = layers,
          .hidden = config.hidden_size,
          .head_dim = config.head_dim,
          .attention_width = config.query_width(),
          .intermediate = config.intermediate_size,
          .vocab = config.vocab_size,
          .longest_document = longest_document,
          .merges = merges,
          .recurrence = recurrence_roundings(config, longest_document, merges),
          .sinks = config.attention_sinks,
          .output_gate = config.output_gate};
}

int64_t roundings_per_layer(const DecoderShape& shape) {
  const int64_t norms = 2 * shape.hidden;
  const int64_t gate = shape.output_gate ? 1 : 0;
  const int64_t projections = (2 + gate) * shape.hidden;  // to Q, K, V, gate of them, gate and up
  const int64_t merges = shape.merges + (shape.sinks ? 1 : 0);
  const int64_t attention = shape.head_dim + shape.longest_document + roundings_per_merge * merges;
  return norms + projections + std::max(attention + shape.attention_width, shape.recurrence) +
         shape.intermediate + 1 + gate;
}

int64_t narrow_roundings_per_layer(const DecoderShape& shape) {
  if (shape.activations != DType::bf16) return 0;
  constexpr int64_t stored = 20, matrices = 7;
  const int64_t summed = 2 * (shape.tp - 1);
  const int64_t gated = (shape.output_gate ? 2 : 0);
  return stored + summed + (shape.sinks ? 1 : 0) + gated + (shape.residual == DType::bf16 ? 2 : 0) +
         (shape.rounded_weights ? matrices : 0);
}

namespace {

int64_t narrow_embedding_roundings(const DecoderShape& shape) {
  return shape.rounded_weights || shape.residual == DType::bf16 ? 1 : 0;
}

/// Tolerance of a value that is `wide` f32 and `narrow` bf16 roundings from the inputs.
double decoder_tolerance(int64_t wide, int64_t narrow) {
  return std::hypot(tolerance_for(DType::f32, wide),
                    narrow_safety / tolerance_safety * tolerance_for(DType::bf16, narrow));
}

}  // namespace

double hidden_tolerance(const DecoderShape& shape) {
  return decoder_tolerance(
      shape.layers * roundings_per_layer(shape),
      shape.layers * narrow_roundings_per_layer(shape) + narrow_embedding_roundings(shape));
}

double residual_sigma(const DecoderShape& shape) {
  const int64_t sums = shape.residual == DType::bf16 ? 2 * shape.layers : 0;
  return narrow_deviation * epsilon_of(DType::bf16) *
         std::sqrt(sums + narrow_embedding_roundings(shape));
}

double score_tolerance(const DecoderShape& shape, double max_abs_logit) {
  // Roundings of the final norm, the logits and the sum over the vocabulary.
  const int64_t after_layers = 2 * shape.hidden + shape.vocab;
  const int64_t narrow_after = narrow_embedding_roundings(shape) +
                               (shape.activations == DType::bf16 ? 1 : 0) +
                               (shape.rounded_weights ? 1 : 0);
  const double expected_max = std::sqrt(2 * std::log(std::max<int64_t>(2, shape.vocab)));
  const double size = std::max(1.0, std::abs(max_abs_logit) / expected_max);
  return size * decoder_tolerance(shape.layers * roundings_per_layer(shape) + after_layers,
                                  shape.layers * narrow_roundings_per_layer(shape) + narrow_after);
}

Perturbation perturbation_of(const DecoderShape& shape) {
  const bool narrow = shape.activations == DType::bf16, recurs = shape.recurrence > 0;
  if (!narrow && !recurs) return {};
  return {recurs ? 4 : 1, (narrow ? 0x1p-9 : 0x1p-14) / std::sqrt(3.0)};
}

double tolerance_over_change(const DecoderShape& shape) {
  if (shape.recurrence == 0) return 0;
  if (shape.activations == DType::bf16) return narrow_safety;
  return tolerance_for(DType::f32, roundings_per_layer(shape)) / perturbation_of(shape).deviation;
}

double kl_tolerance(double student, double teacher, double distance, double deviation,
                    int64_t vocab) {
  const double second = (student * student + teacher * teacher) / (2 * narrow_safety);
  return std::hypot(student * std::min(1.0, distance), teacher * deviation) + second +
         logprob_tolerance() * entropy_scale(vocab);
}

}  // namespace gyre
