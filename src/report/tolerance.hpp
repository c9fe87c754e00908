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
#include <span>

#include "attention/plan.hpp"
#include "comm/communicator.hpp"
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

// Attention and its gradients, in full. Sums are kept in f32; some partial results are stored or
// sent in bf16. With D = head_dim, K = keys that a query sees, Q = query rows (of all heads of a
// group) that see a key, P = partial results that are merged into a query's, H = hops of dK and dV;
// scores have the rms s, the largest is about X = s · sqrt(2 ln K), and log-sum-exps are about
// L = max(1 + ln K, X):
//
//     score x           D s²        dot product; an absolute error, so its size matters
//     merging           4P + 3X²P   partial log-sum-exps are rounded at their size, which is as bad
//                                   as 3X² roundings each
//     log-sum-exp       K           sum; 3L²P more for the final one, where p is made from it
//     p = exp(x - L)                passes absolute errors on as relative ones: all of these
//     out               K           sum of p · v
//     dP                D           dot product
//     delta             D           dot product, and what out has
//     dS = p (dP - delta)           the errors of p, dP and delta, relative to what dP was before
//                                   delta was taken away
//     dQ                K           sum of dS · k
//     dK, dV            Q + H       sums of dS · q and p · dO, and of what other ranks send
//
//     n_out  = D s² + K + (4 + 3X²) P + 1             also of the log-sum-exp, absolute
//     n_p    = n_out + 3L²P
//     n_dQ   = n_p + n_out + 2D + K                   n_dV   = n_p + Q + H
//     n_dK   = n_p + n_out + 2D + Q + H               n_dz   = n_p + n_out + D, summed in f64
//
// Roundings to bf16 are counted apart, because they are 65536 times as large: P of out if that is
// what partial results are, which reach dQ, dK and the sinks by delta; P of dQ; H of dK and dV; and
// one for every time that out or dQ travels as an activation. Inputs are exact values of bf16.
//
//     tolerance = safety / 6 · sqrt(eps_f32² n_f32 + eps_bf16² n_bf16)
//
// Errors are relative to error_scale(): the larger of the rms of the reference's row of one head,
// and the size of the terms that it was made of (attention_reference.hpp), the gradient of a sink
// being a row of one. The rms alone will not do: dP and delta may cancel, and do so entirely for a
// query that sees one key, whose dQ is 0. The rms of a whole tensor or document will not do either:
// rows of dK and dV shrink with the number of queries that see them, to 1/K at the end of a
// document, and an error there must not hide behind the large rows at its beginning; and the first
// queries of a document, which see few keys, have the largest dQ and the largest errors. The size
// is a row's own in both cases.
//
// Measured with a plain f32 computation, key by key, of normal inputs, documents of 1 to 2048
// tokens, head_dim 32 to 128, P = 1 and 8, the worst values of tensors use these shares of the
// tolerances: 0.1 to 0.35 of out, dQ, dK and dV where all is f32, 0.1 to 0.6 where all that can be
// is bf16, 0.05 to 0.1 of log-sum-exps, 0.01 to 0.1 of gradients of sinks, which are few; with
// scores of size 4 to 64 up to 0.7. Leaving out one block of 64 keys uses 17000 times the tolerance
// of every tensor but the sinks' (4 times and more) in f32, and 13 times in bf16, where the sinks'
// gradients do not show it.

/// What of an attention determines its tolerances.
struct AttentionReductions {
  int64_t head_dim = 0;
  int64_t keys = 0;       ///< the most that one query sees
  int64_t queries = 0;    ///< the most rows that see one key, times the heads of its group
  int64_t partials = 1;   ///< results that are merged into a row of out
  int64_t d_q_terms = 1;  ///< results that are added to a row of dQ
  int64_t hops = 0;       ///< times that a sum of dK and dV travels, or terms that come
  int64_t out_trips = 0;  ///< times that out travels
  int64_t d_q_trips = 0;  ///< times that dQ travels
  double score_size = 1;  ///< rms of scores; 1 for normal inputs and a scale of head_dim^-1/2
};

/// Counted from the steps of one rank's plan and the documents of the layout. Ranks may differ.
AttentionReductions attention_reductions(const RankPlan& plan, const AttentionProblem& problem);
/// The most of all ranks.
AttentionReductions attention_reductions(const Plan& plan, const AttentionProblem& problem);
/// The same from each rank's own plan, on all ranks. Collective over `group`.
AttentionReductions attention_reductions(const RankPlan& mine, const AttentionProblem& problem,
                                         Communicator& group);

/// Tolerances of each tensor, relative to error_scale(); lse absolute.
struct AttentionTolerances {
  double out = 0, lse = 0, d_q = 0, d_k = 0, d_v = 0, d_sinks = 0;
};
/// A kernel that rounds weights to bf16 adds one rounding to each of out, dQ, dK and dV (terms of a
/// sum err independently, and so does the sum, relative to its size), and the one of out to what
/// depends on delta; one that rounds results adds one for each of them.
AttentionTolerances attention_tolerances(const AttentionReductions& lengths,
                                         const ElementTypes& types,
                                         const KernelPrecision& kernel = {});

/// What errors in a row of one head are relative to: the larger of its rms and of its size, but not
/// less than 2^-80. A p below 2^-126 is 0 in f32, so that a row of which nothing is left in f32 may
/// be something in f64: the sum of up to 2^20 terms of at most 2^-120, here within a tolerance of
/// 2^-20.
double error_scale(std::span<const double> row, double size);

// Log-probabilities and entropies of given logits, and their gradients. Sums over a row are kept in
// f32 over runs of it, and in f64 over the runs, so that a sum counts for `row_roundings` whatever
// the vocabulary. A relative error of exp(x) is an absolute one of log p; x = z - max and the
// result are rounded at their size, which is |log p| for a result that is not near 0, four times at
// most. So
//
//     log p, cross entropy     tolerance_for(f32, row_roundings), relative to
//                              sqrt(1 + 4 |value|² / row_roundings)
//     entropy                  the same, relative to max(1, ln vocab): a mean of |log p|
//     dz_v                     the same, and one rounding to the type that it is stored in;
//                              relative to what it was made of, element by element, so that the
//                              tail of a distribution is checked as closely as its top
//
// dz_v = p (a + b log p) + weights, see row_gradient.hpp, where a holds b H, H being the entropy. A
// relative error e of what log p was made of is one of e (1 + |log p|) of p, and with it of the
// whole product. H and log p have errors besides, e max(1, |log p|) each (H as a mean of |log p|),
// absolute ones that stay when p is near 1 and both vanish. So errors are relative to
//
//     p (|a| + |b| max(1, |log p|)) (1 + |log p|) + |weights|
//
// Measured with a plain f32 computation that adds up runs of row_roundings columns, up to 152 K of
// them, logits of size 0 to 20, with and without a common offset of 1000, and rows where one column
// is nearly certain: shares of 0.01 to 0.1. Leaving out one column of 32 K of equal probability
// moves every log p by 3e-5; |log p| is 10 there, and 1.3e-5 is tolerated.

inline constexpr int64_t row_roundings = 64;

double logprob_tolerance();
double logprob_scale(double logprob);
double entropy_scale(int64_t vocab_size);
double logit_gradient_tolerance(DType stored);
/// `weights`: sum of the magnitudes of what ids add. At least 2^-80, below which f32 flushes to 0.
double logit_gradient_scale(double logprob, double a, double b, double weights);

// The same from hidden states: logits are dot products of length `hidden`, wrong by
// tolerance_for(f32, hidden) of their size, which is their rms (over the temperature), or 1 if that
// is less. Log-softmax passes that on as it is, and an entropy as a mean of it, weighted by |log
// p|; a p is wrong by it relatively. So
//
//     log p, entropy           tolerance_for(f32, hidden) · size + logprob_tolerance(), relative to
//                              logprob_scale() and entropy_scale()
//     dX, dW                   the same and tolerance_for(f32, terms) for the sum of `terms`
//                              products: the columns of all ranks for a row of dX, the tokens for
//                              one of dW; relative to error_scale() of the reference's row, of
//                              which the size is the root of the sum of squares of its terms, those
//                              of logit_gradient_scale() times the other factor
//
// bf16 inputs are widened exactly and need nothing more. Measured for normal hidden states and
// logits of size 0.5 to 8: shares of 0.003 to 0.08.

double linear_logprob_tolerance(int64_t hidden, double logit_size = 1);
double linear_gradient_tolerance(int64_t hidden, int64_t terms, double logit_size = 1);

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
