#pragma once
// The one place where tolerances come from.
//
// Model. A result that went through n roundings carries a relative error of about
//
//     eps · sqrt(n)
//
// Roundings are as often up as down, so that their errors add like a random walk: as sqrt(n), not
// as n, the worst case that never happens. n is the length of every reduction on the way from the
// inputs to the result (a dot product of length k rounds k times), plus four for every merge of
// partial attention results, plus one.
//
// A tolerance bounds the largest error of millions of values, where the walk predicts the typical
// one, and a softmax over large scores magnifies what it is given. Both are covered by one factor:
//
//     tolerance = safety · eps · sqrt(n)          safety = 16
//
// The safety was chosen by running decoders of 2 to 24 layers, widths 64 to 256 and 64 to 2048
// tokens, with weights from the usual size (1/sqrt(fan-in)) to three times it, in f32 against f64:
// the largest error of any hidden state, over the rms of its row, was 0.3 to 0.6 · eps · sqrt(n)
// for the usual weights and 1.5 to 6.4 for the large ones. An indexing mistake (one key too many, a
// position off by one) is wrong by 1e-2 and more, at tolerances of 1e-4.
//
// Errors are relative to the rms of the row of the reference that the value is in, never to the
// value itself, which may be zero by cancellation.

#include <cstdint>

#include "core/dtype.hpp"

namespace gyre {

inline constexpr double tolerance_safety = 16;
inline constexpr int64_t roundings_per_merge = 4;

/// Distance from 1 to the next larger number; 0 for integers, which are exact.
double epsilon_of(DType type);

/// safety · eps · sqrt(roundings): the model above.
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

/// Log-probability or entropy (nats), absolute. A relative error r of the hidden state moves a
/// logit by about r times the size of the logits, for which `max_abs_logit` of the reference
/// stands; log-softmax passes that on and rounds at the size of its result, up to log(vocab).
double score_tolerance(const DecoderShape& shape, double max_abs_logit);

}  // namespace gyre
