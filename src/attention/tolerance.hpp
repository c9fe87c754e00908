#pragma once
// Tolerances of attention and its gradients (the error model: core/tolerance.hpp).

#include "attention/plan.hpp"
#include "comm/communicator.hpp"
#include "core/tolerance.hpp"

namespace gyre {

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
// for dQ, H for dK and dV, and one for every time that out or dQ is sent as an activation. Partial
// results that are sent before they are merged add one rounding to out, and so to delta.
// Inputs are exact values of bf16.
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
  int64_t partial_trips = 0;  ///< 1 if partial results are sent before they are merged; else 0
  int64_t out_trips = 0;      ///< sends of merged results
  int64_t d_q_trips = 0;      ///< sends of dQ
  double score_size = 1;      ///< rms of scores; 1 for normal inputs and a scale of head_dim^-1/2
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

}  // namespace gyre
