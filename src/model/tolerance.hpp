#pragma once
// Tolerances of a decoder: hidden states and scores (the error model: core/tolerance.hpp).

#include "core/model_config.hpp"
#include "core/tolerance.hpp"

namespace gyre {

/// Lengths of the reductions of a decoder.
struct DecoderShape {
  int64_t layers = 0;  ///< up to and including the one whose output is compared
  int64_t hidden = 0;
  int64_t head_dim = 0;
  int64_t attention_width = 0;  ///< heads * head_dim: input of the output projection
  int64_t intermediate = 0;
  int64_t vocab = 0;
  int64_t longest_document = 0;
  int64_t merges = 0;  ///< merges of partial attention results, per layer
  /// Roundings between the projections of a recurrent layer; 0 without such layers.
  int64_t recurrence = 0;
  int64_t tp = 1;  ///< ranks whose parts are added by all-reduces, in the type of activations
  DType activations = DType::f32;  ///< of weights and of all activations but the residual stream
  DType residual = DType::f32;
  bool sinks = false;            ///< one more merge and rounding of attention's output
  bool output_gate = false;      ///< a projection and a product with attention's output
  bool rounded_weights = false;  ///< the reference has weights that are not rounded to bf16
};

/// Shape of an f32 decoder up to and including layer `layers`.
DecoderShape decoder_shape(const ModelConfig& config, int64_t layers, int64_t longest_document,
                           int64_t merges);

/// f32 roundings in one layer: norms, projections, scores, attention, merges, MLP. With recurrent
/// layers, those of a layer of the kind that has more.
int64_t roundings_per_layer(const DecoderShape& shape);
/// Roundings to bf16 in one layer: inputs of products, queries and keys before and after biases,
/// norms and rotation, probabilities, outputs, what is added to the residual stream, all-reduces, a
/// bf16 residual stream, rounded weights. 0 in an f32 decoder.
int64_t narrow_roundings_per_layer(const DecoderShape& shape);
/// Safety factor of bf16 roundings. They are independent and few, so their error is close to the
/// root of their number; a factor as large as that of f32 would accept any result.
inline constexpr double narrow_safety = 16;

/// Tolerance of the hidden state after `shape.layers` layers, relative to the rms of the
/// reference's row.
double hidden_tolerance(const DecoderShape& shape);

/// Standard deviation, in the same units, of the roundings of the residual stream itself, which are
/// those of embeddings and sums. It is 0 in f32, and where only what is added is bf16.
double residual_sigma(const DecoderShape& shape);

/// Absolute tolerance of a log-probability or entropy (nats). A relative error of the hidden state
/// is the same error of the logits, relative to their typical size. That size is estimated from the
/// reference's largest logit, `max_abs_logit`, as for `vocab` normal variables:
/// max / sqrt(2 ln vocab), at least 1. Log-softmax passes the error of the logits on.
double score_tolerance(const DecoderShape& shape, double max_abs_logit);

/// Passes with perturbed weights of norms, and the relative standard deviation of the perturbation.
struct Perturbation {
  int passes = 0;
  double deviation = 0;
};
/// Returns the perturbation that a decoder needs; no pass if its shape gives all tolerances.
Perturbation perturbation_of(const DecoderShape& shape);

/// Tolerance of a value over the rms of its change by the perturbation; 0 for decoders without
/// recurrent layers. See below.
double tolerance_over_change(const DecoderShape& shape);

/// Absolute tolerance of a divergence Σ p (log p - log q) (nats), with the tolerances `student` and
/// `teacher` of log q and log p. An error e_v of log q_v changes it by -Σ p e, and because
/// Σ q e = 0 by Σ (q - p) e: at most `distance` = Σ |p - q| times e, or e. An error of log p_v is a
/// relative error of p_v, with Σ p e = 0. It changes the divergence by Σ p e (log p - log q - KL):
/// at most `deviation` = Σ p |log p - log q - KL| times e. Both are independent. Second-order terms
/// are half of the squares of the errors, without one safety factor. The cross entropy and the
/// entropy, whose difference it is, are rounded at their size.
double kl_tolerance(double student, double teacher, double distance, double deviation,
                    int64_t vocab);

// Recurrent layers. The norm of a head's output o amplifies the errors of o by up to 1/sqrt(eps)
// where the terms of o cancel. That happens in some heads of some tokens, and their errors reach
// later layers and tokens. So the change of each value is measured: its rms over four passes with
// perturbed norms. The change in a single pass may be small by chance. A value's tolerance is the
// larger one of that of the shape and
//
//     f32     safety · eps/6 · sqrt(roundings_per_layer()) / deviation · change
//     bf16    narrow_safety · change
//
// In f32 the perturbation is far larger than roundings, and so small that values change in
// proportion. It gives each norm a relative error of the standard deviation `deviation`; the
// roundings of a layer give one of eps/6 · sqrt(n). In bf16 it has the size of a rounding.
//
// Measured with 2 to 8 layers, weights 0.6 to 2 times 1/sqrt(fan-in) and an eps of 0, 1e-6, 1e-5
// and 1e-3: errors of scores are up to 0.08 of these tolerances in f32, and up to 0.54 in bf16, one
// model of 48 excepted (eps 0, weights twice as large: 1.5).

// This is what errors of a bf16 decoder have in common. Their size hardly depends on depth:
// attention that is nearly an argmax amplifies the errors of earlier layers, and predictions that
// are nearly certain hide them. With random weights of equal depth it differs by a factor of 50. It
// is measured, as in Monte Carlo arithmetic (Parker, UCLA CSD-970002, 1997): the decoder runs again
// with random relative errors of the size of a rounding (standard deviation 2^-9 / sqrt(3)) in the
// weights of all norms. All roundings then fall otherwise, and the change of the results has the
// rms of the difference of two results with independent errors, and of the perturbation: at least
// sqrt(2) times that of the errors. This change is sigma in common_error_limits(). It does not
// depend on the reference. As few values may change little by chance, four more are counted with
// the model's sigma, the tolerance over narrow_safety. Hidden states have residual_sigma() as well,
// because norms follow it.
//
// Measured with 1 to 8 layers, widths of 48 to 192, weights 0.6 to 3 times 1/sqrt(fan-in) and
// trained ones: the rms of all errors is 0.62 to 0.98 sigma (log-probabilities and entropies,
// rounded weights included), their mean at most 0.15 sigma. In the trained model, whose sigma is
// 0.011 nats, twice the base of the rotary embedding gives 9 sigma, an epsilon of norms of 1e-3 for
// 1e-5 2.3 and 3.1 sigma (log-probabilities and entropies), logits 1 % too large a factor that is
// 1.6 and a mean that is 2.5 sigma off.

}  // namespace gyre
