#pragma once
// What plans should count, by formula: pairs, messages, bytes and memory of every schedule without
// looking at a step. Each schedule brings its own (Schedule::closed_form); here are the table of
// them and the pairs, which are of the layout. Tests compare count() with these, and an app does so
// when it starts.
//
// With n slots on each of cp ranks, k and k_g bytes of a rank's keys and values, and of their
// gradients, in a message, and K_g the latter where they are summed (f32), one rank sends
//
//                        forward           backward                        transient memory
//     ring               (cp-1) k          (cp-2) k + (cp-1) k_g           2 k / 2 k + 2 K_g
//     ring-forward       (cp-1) k          (cp-1) k + cp k_g               2 k / 2 k + 2 K_g
//     all-gather         (cp-1) k          (cp-1) (k + k_g)                (cp-1) k / + (cp-1) K_g
//     all-to-all         its tokens to the other ranks' heads and back: see head_exchange.cpp
//     group-cast, halo   the rows that others see, instead of (cp-1) k
//     canonical          (cp-1) k of real tokens; backward q, d_out, statistics as well
//
// and as much memory again as copies for messages take: slices of some heads, of another element
// type, or to be added.

#include <optional>

#include "attention/plan.hpp"

namespace gyre {

/// Visible pairs of all queries, of one head, for any documents.
int64_t pairs_of_all_ranks(const AttentionProblem& problem);

/// Visible pairs of the queries of one rank, of one head. There is a form for one or several
/// sequences of equal length S that fill their slots, for layouts whose entry says which slots a
/// rank owns then (LayoutKind::owned):
///     contiguous, zigzag, dual-chunk-swap   any S
///     striped                               a stripe of 1 and S divisible by cp
/// and every mask, of several sequences but tables of regions: a causal prefix of t tokens has V(t)
/// = visible_pairs(t) pairs, so that the queries of slots [a, b) of a sequence have V(b) - V(a).
/// For one causal sequence, L = S/cp:
///     contiguous        r L² + L(L+1)/2
///     dual-chunk-swap   S(S+1) / (2 cp) on every rank
///     striped           (r+1) L(L+1)/2 + (cp-1-r) L(L-1)/2
std::optional<int64_t> visible_pairs_of(const AttentionProblem& problem, int rank);

/// Share of a ring's bytes (cp (cp-1) k over all ranks) that group-cast moves forward. There is a
/// form for one causal sequence without a window that fills its slots, S divisible by cp (2 cp for
/// dual-chunk-swap), and cp > 1, where the layout's entry has one (LayoutKind::needed_share):
///     contiguous        1/2            all rows of the ranks before
///     dual-chunk-swap   3/4            the first half of the rows of ranks before, all of ranks
///     after striped by 1      1 - 1/(2 L)    all rows, but the last one of ranks after
std::optional<double> needed_share(const AttentionProblem& problem);

}  // namespace gyre
