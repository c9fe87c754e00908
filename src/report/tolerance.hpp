#pragma once
// All tolerances, and the error model that they follow from.
//
// Model. The error of one rounding is uniform in [-eps/2, eps/2]: its standard deviation is
// eps/sqrt(12). Roundings go up as often as down. So n of them add up like a random walk, as
// sqrt(n), not as n, the worst case, which never happens. The partial sums that are rounded grow
// towards the result, which divides the error by another sqrt(3). After n roundings, the error of a
// result, relative to its size, has the standard deviation
//
//     sigma = eps / 6 · sqrt(n)
//
// n is the sum of the lengths of all reductions between the inputs and the result (a dot product of
// length k rounds k times), plus four for every merge of partial attention results, plus one. A
// tolerance bounds the largest error of millions of values, which is five or six sigma. A softmax
// over large scores also amplifies the error of its input. The factor `safety` allows for both:
//
//     tolerance = safety · sigma          safety = 32
//
// Measured errors, as shares of these tolerances, are 0.05 to 0.12 for hidden states of decoders of
// 2 to 24 layers and up to 2048 tokens in f32 against f64, with random weights of the usual size
// (1/sqrt(fan-in)), up to 0.7 with weights 1.5 to 3 times larger, and 0.1 to 0.3 for trained
// models. Eight layers of weights twice as large, where attention is a near-argmax and every layer
// amplifies the error of the previous one, reach 1.2: --tol-scale exists for such models. For
// comparison, leaving out one key of every block gives errors of 2 and more, where tolerances are
// 1e-5 to 1e-4.
//
// Errors are relative to the rms of the value's row in the reference, never to the value itself,
// which may be zero by cancellation.

#include <cstdint>
#include <span>

#include "attention/plan.hpp"
#include "comm/communicator.hpp"
#include "core/dtype.hpp"
#include "core/model_config.hpp"

namespace gyre {

inline constexpr double tolerance_safety = 32;
inline constexpr int64_t roundings_per_merge = 4;

/// Distance from 1 to the next larger number; 0 for integers, which are exact.
double epsilon_of(DType type);

// Storing a result in bf16 rounds it once, by at most half of the distance to the next number: 2^-8
// of its value. That bounds every element, so that it is not a part of the random walk. The
// tolerance of such a value is tolerance · scale + 2^-8 |value|.

/// Returns what storing in `stored` adds to the scale of an error, as a factor of the value: 2^-8 /
/// tolerance for bf16, 0 for f32.
double storage_scale(DType stored, double tolerance);

// What errors have in common. The tolerance of one value allows for the largest of millions of
// random errors. In bf16, that is several percent, and a wrong factor or offset of all values is
// below it. But random errors cancel: of n errors with the standard deviation sigma, the rms is
// sigma, and their mean is about sigma / sqrt(n). So every check of bf16 results also bounds
//
//     the rms of all errors                2 sigma (1 + 2 / sqrt(n))
//     the mean of all errors               sigma (0.3 + 4 / sqrt(n))
//     the factor of all values, minus 1    the same, over the rms of the references
//
// where sigma is the standard deviation of an error, without a safety factor. The factor is
// that of the least squares: 1 + Σ error · reference / Σ reference². The second terms are for few
// values, of which one may be large. Mean and factor have 0.3 sigma beside their random part,
// because errors are not quite independent: all outputs of a layer share its rounded inputs.

/// Standard deviation of one rounding to bf16, relative to the value, in units of epsilon:
/// sqrt(1/12) times the rms of 1/m for mantissas m whose logarithms are uniform,
/// sqrt(3 / (8 ln 2)). Partial sums do not grow: each partial result is rounded once, at the size
/// of the result.
inline constexpr double narrow_deviation = 0.2123;

struct CommonErrors {
  double rms = 0, mean = 0, factor = 0;
};
/// Bounds for `values` errors, relative to references whose squares have the sum `squares`.
CommonErrors common_error_limits(double sigma, double values, double squares);

/// safety · eps / 6 · sqrt(roundings), by the model above.
double tolerance_for(DType type, int64_t roundings);

/// Tolerance of the attention output of one query row, relative to the rms of the reference's row;
/// also the absolute tolerance of its log-sum-exp. `keys`: the most keys that one query sees;
/// `merges`: number of partial results that are merged into it.
double attention_tolerance(int64_t head_dim, int64_t keys, int64_t merges);

// Attention and its gradients. Sums are kept in f32; some partial results are stored or sent in
// bf16. Let D = head_dim, E = value_dim, K = keys that a query sees, Q = query rows (of all heads
// of a group) that see a key, P = partial results that are merged into the result of a query, H =
// hops of dK and dV. Scores have the rms s, the largest is about X = s · sqrt(2 ln K), and
// log-sum-exps are about L = max(1 + ln K, X). The roundings of each step are
//
//     score x           D s²        dot product; the error is absolute, so the score's size counts
//     merging           4P + 3X²P   a partial log-sum-exp is rounded at its size, which counts as
//                                   3X² roundings
//     log-sum-exp       K           sum; 3L²P more for the final one, from which p is computed
//     p = exp(x - L)                turns absolute errors into relative ones: all of the above
//     out               K           sum of p · v
//     dP                E           dot product
//     delta             E           dot product, and the roundings of out
//     dS = p (dP - delta)           the errors of p, dP and delta, relative to dP before delta is
//                                   subtracted
//     dQ                K           sum of dS · k
//     dK, dV            Q + H       sums of dS · q and p · dO, and of terms from other ranks
//
//     n_out  = D s² + K + (4 + 3X²) P + 1             also of the log-sum-exp, absolute
//     n_p    = n_out + 3L²P
//     n_dQ   = n_p + n_out + 2E + K                   n_dV   = n_p + Q + H
//     n_dK   = n_p + n_out + 2E + Q + H               n_dz   = n_p + n_out + E, summed in f64
//     n_dKs  = n_dK + H + 1: shared elements of keys, whose sum over heads a message rounds
//
// Roundings to bf16 are counted separately, because they are 65536 times as large. Their numbers
// are: P for out if partial results are bf16 (these reach dQ, dK and the sinks through delta), P
// for dQ, H for dK and dV, and one for every time that out or dQ is sent as an activation. Inputs
// are exact values of bf16.
//
//     tolerance = safety / 6 · sqrt(eps_f32² n_f32 + eps_bf16² n_bf16)
//
// Errors are relative to error_scale(): the larger of the rms of the reference's row of one head
// and the size of the terms that the row is the sum of (attention_reference.hpp). The gradient of a
// sink is a row of one element. The rms alone is not enough: dP and delta may cancel, and cancel
// entirely for a query that sees one key, whose dQ is 0. The rms of a whole tensor or document is
// not enough either: rows of dK and dV shrink with the number of queries that see them, to 1/K at
// the end of a document, and an error there must not be masked by the large rows at its beginning.
// The first queries of a document, which see few keys, have the largest dQ and the largest errors.
// So each row has its own scale.
//
// Errors were measured with a plain f32 computation, key by key, on normal inputs, documents of 1
// to 2048 tokens, head_dim 32 to 128, P = 1 and 8. The largest ones, as shares of the tolerances,
// are 0.1 to 0.35 for out, dQ, dK and dV if everything is f32, 0.1 to 0.6 if all that can be is
// bf16, 0.05 to 0.1 for log-sum-exps, 0.01 to 0.1 for gradients of sinks, which are few, and up to
// 0.7 with scores of size 4 to 64. Leaving out one block of 64 keys gives 17000 times the tolerance
// of every tensor in f32, except the sinks' gradients (4 times and more), and 13 times in bf16,
// where the sinks' gradients do not show it. The rms of the errors of bf16 results is 0.3 to 0.7 of
// its limit; a wrong factor of 1 % is 2 to 20 times its limit.

/// The properties of an attention that determine its tolerances.
struct AttentionReductions {
  int64_t head_dim = 0, value_dim = 0;
  int64_t keys = 0;       ///< the most keys that one query sees
  int64_t queries = 0;    ///< the most query rows that see one key, times the heads of its group
  int64_t partials = 1;   ///< results that are merged into a row of out
  int64_t d_q_terms = 1;  ///< results that are added to a row of dQ
  int64_t hops = 0;       ///< transfers of a sum of dK and dV on its way, or of terms of it
  int64_t out_trips = 0;  ///< sends of out
  int64_t d_q_trips = 0;  ///< sends of dQ
  double score_size = 1;  ///< rms of scores; 1 for normal inputs and a scale of head_dim^-1/2
};

/// The counts in the steps of one rank's plan and in the documents of the layout. Ranks may differ.
AttentionReductions attention_reductions(const RankPlan& plan, const AttentionProblem& problem);
/// The largest counts of all ranks.
AttentionReductions attention_reductions(const Plan& plan, const AttentionProblem& problem);
/// The largest counts, from each rank's own plan, on all ranks. Collective over `group`.
AttentionReductions attention_reductions(const RankPlan& mine, const AttentionProblem& problem,
                                         Communicator& group);

/// Tolerances of each tensor, relative to error_scale(); that of lse is absolute.
struct AttentionTolerances {
  double out = 0, lse = 0, d_q = 0, d_k = 0, d_k_shared = 0, d_v = 0, d_sinks = 0;
};
/// A kernel that rounds weights to bf16 adds one rounding to each of out, dQ, dK and dV (the errors
/// of the terms of a sum are independent, so the sum has the error of one term, relative to its
/// size), and the rounding of out to everything that depends on delta. A kernel that rounds its
/// results adds one rounding for each result.
AttentionTolerances attention_tolerances(const AttentionReductions& lengths,
                                         const ElementTypes& types,
                                         const KernelPrecision& kernel = {});
/// Expected standard deviations of the errors, in the same units; 0 where nothing is rounded to
/// bf16, because the tolerance alone is small there.
AttentionTolerances attention_sigmas(const AttentionReductions& lengths, const ElementTypes& types,
                                     const KernelPrecision& kernel = {});

/// The scale of errors in a row of one head: the larger of its rms and `size`, at least 2^-80. A
/// weight below 2^-126 is 0 in f32. A row may therefore vanish in f32 but not in f64, where it is a
/// sum of up to 2^20 terms of at most 2^-120; such a row is within a tolerance of 2^-20.
double error_scale(std::span<const double> row, double size);

// Log-probabilities and entropies of given logits, and their gradients. A sum over a row is kept in
// f32 over runs of the row, and in f64 over the runs, so that it counts as `row_roundings` for any
// vocabulary. A relative error of exp(x) is an absolute error of log p. x = z - max and the result
// are rounded at their size, which is |log p| for a result that is not near 0, at most four times.
// So
//
//     log p, cross entropy     tolerance_for(f32, row_roundings), relative to
//                              sqrt(1 + 4 |value|² / row_roundings)
//     entropy                  the same, relative to max(1, ln vocab): a mean of |log p|
//     dz_v                     the same, and one rounding to the type that it is stored in;
//                              relative to the size of its terms, element by element, so that the
//                              tail of a distribution is checked as closely as its top
//
// dz_v = p (a + b log p) + weights, see row_gradient.hpp, where a contains b H and H is the
// entropy. A relative error e of the inputs of log p becomes a relative error e (1 + |log p|) of p,
// and of the whole product. In addition, H and log p each have an absolute error e max(1, |log p|)
// (H is a mean of |log p|), which remains when p is near 1 and both vanish. So errors are relative
// to
//
//     p (|a| + |b| max(1, |log p|)) (1 + |log p|) + |weights|
//
// A plain f32 computation that adds up runs of row_roundings columns, with up to 152 K columns,
// logits of size 0 to 20, with and without a common offset of 1000, and rows where one column is
// nearly certain, has errors of 0.01 to 0.1 of the tolerances. Leaving out one of 32 K columns of
// equal probability moves every log p by 3e-5; |log p| is 10 there, and the tolerance is 1.3e-5.

inline constexpr int64_t row_roundings = 64;

double logprob_tolerance();
double logprob_scale(double logprob);
double entropy_scale(int64_t vocab_size);
/// Returns the scale of a term of a divergence, q (log q - log p) or, for a sampled id, log q - log
/// p, and of its derivative by log q. The relative error of q is the error of log q. 0 if q is 0.
double divergence_scale(double log_q, double log_p, bool sampled);
double logit_gradient_tolerance(DType stored);
/// `weights`: sum of the magnitudes of the terms that ids add. The result is at least 2^-80,
/// because f32 flushes small terms to 0.
double logit_gradient_scale(double logprob, double a, double b, double weights);

// Log-probabilities from hidden states. Logits are dot products of length `hidden`; their error is
// tolerance_for(f32, hidden) times their size, which is their rms (over the temperature), at least
// 1. Log-softmax passes this error on unchanged. An entropy has its mean, weighted by |log p|. A
// probability p has it as a relative error. So
//
//     log p, entropy           tolerance_for(f32, hidden) · size + logprob_tolerance(), relative to
//                              logprob_scale() and entropy_scale()
//     dX, dW                   the same, plus tolerance_for(f32, terms) for the sum of `terms`
//                              products: the columns of all ranks for a row of dX, the tokens for a
//                              row of dW; relative to error_scale() of the reference's row. Its
//                              size is the root of the sum of squares of its terms, which are
//                              logit_gradient_scale() times the other factor
//
// bf16 inputs are widened exactly and add no error. Measured errors for normal hidden states and
// logits of size 0.5 to 8 are 0.003 to 0.08 of the tolerances.

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
  int64_t merges = 0;  ///< merges of partial attention results, per layer
  int64_t tp = 1;      ///< ranks whose parts are added by all-reduces, in the type of activations
  DType activations = DType::f32;  ///< of weights and of all activations but the residual stream
  DType residual = DType::f32;
  bool sinks = false;            ///< one more merge and rounding of attention's output
  bool rounded_weights = false;  ///< the reference has weights that are not rounded to bf16
};

/// Shape of an f32 decoder up to and including layer `layers`.
DecoderShape decoder_shape(const ModelConfig& config, int64_t layers, int64_t longest_document,
                           int64_t merges);

/// f32 roundings in one layer: norms, projections, scores, attention, merges, MLP.
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

// What errors of a bf16 decoder have in common. Their size is hardly a matter of depth: attention
// that is nearly an argmax amplifies the errors of earlier layers, and predictions that are nearly
// certain hide them. With random weights of equal depth it differs by a factor of 50. It is
// measured, as in Monte Carlo arithmetic (Parker, UCLA CSD-970002, 1997): the decoder runs again
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
