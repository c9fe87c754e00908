#pragma once
// Tolerances of log-probabilities and their gradients (the error model: core/tolerance.hpp).

#include "core/tolerance.hpp"

namespace gyre {

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

}  // namespace gyre
