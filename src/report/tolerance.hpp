#pragma once
// The one place where tolerances come from.
//
// Model. One rounding is wrong by up to eps/2 either way, evenly: its standard deviation is
// eps/sqrt(12). Roundings are as often up as down, so that n of them add like a random walk, as
// sqrt(n), and not as n, the worst case that never happens. The partial sums that they apply to
// grow towards the result, which takes off another sqrt(3). A result that went through n roundings
// thus has an error, relative to its size, of standard deviation
//
//     sigma = eps / 6 · sqrt(n)
//
// n is the length of every reduction on the way from the inputs to the result (a dot product of
// length k rounds k times), plus four for every merge of partial attention results, plus one. A
// tolerance bounds the largest error of millions of values, five or six sigma, and a softmax over
// large scores magnifies the error that it is given:
//
//     tolerance = safety · sigma          safety = 32
//
// Measured, as a share of these tolerances: 0.05 to 0.12 for hidden states of decoders of 2 to 24
// layers and up to 2048 tokens in f32 against f64, with weights of the usual random size
// (1/sqrt(fan-in)); up to 0.7 with weights 1.5 to 3 times larger; 0.1 to 0.3 for trained models.
// Eight layers of double weights, where attention is a near-argmax and every layer magnifies the
// error of the last, reach 1.2: that is what --tol-scale is for. Leaving out one key of every
// block, for comparison, is wrong by 2 and more, where tolerances are 1e-5 to 1e-4.
//
// Errors are relative to the rms of the row of the reference that the value is in, never to the
// value itself, which may be zero by cancellation.

#include <cstdint>

#include "core/dtype.hpp"

namespace gyre {

inline constexpr double tolerance_safety = 32;
inline constexpr int64_t roundings_per_merge = 4;

/// Distance from 1 to the next larger number; 0 for integers, which are exact.
double epsilon_of(DType type);

/// safety · eps / 6 · sqrt(roundings): the model above.
double tolerance_for(DType type, int64_t roundings);

/// Attention output of one query row over the rms of the reference's row; also the absolute
/// tolerance of its log-sum-exp. `keys`: the most that one query sees; `merges`: how many partial
/// results are folded into it.
double attention_tolerance(int64_t head_dim, int64_t keys, int64_t merges);

/// Lengths of the reductions of a decoder.
struct DecoderShape {
  int64_t layers = 0;  ///< up to and including the one whose output is compared
  int64_t hidden = 0;
  int64_t head_dim = 0;
  int64_t attention_width = 0;  ///< heads * head_dim: input of the output projection
  int64_t intermediate = 0;
  int64_t vocab = 0;
  int64_t longest_document = 0;
  int64_t merges = 0;  ///< of partial attention results, per layer
};

/// Roundings on the way through one layer: norms, projections, scores, attention, merges, MLP.
int64_t roundings_per_layer(const DecoderShape& shape);

/// Hidden state behind `shape.layers` layers, over the rms of the reference's row.
double hidden_tolerance(const DecoderShape& shape);

/// Log-probability or entropy (nats), absolute. A relative error of the hidden state moves the
/// logits by that much of their typical size, which is estimated from the largest, `max_abs_logit`
/// of the reference, as that of `vocab` normal variables: max / sqrt(2 ln vocab), at least 1.
/// Log-softmax passes the error of the logits on.
double score_tolerance(const DecoderShape& shape, double max_abs_logit);

}  // namespace gyre
