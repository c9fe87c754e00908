#pragma once
// Expected counts of plans by formula: pairs, messages, bytes and memory of every schedule, without
// reading its steps. Each schedule has its own form (Schedule::closed_form); here are an overview,
// and the pairs of a rank's queries by layout and mask. Tests, and apps at startup, compare count()
// with these.
//
// Bytes that one of cp ranks sends, and its transient memory (forward / backward). In messages, a
// rank's keys and values take k bytes, their gradients k_g; in memory (f32) the gradients take K_g.
//                        forward           backward                    transient memory
//     ring               (cp-1) k          (cp-2) k + (cp-1) k_g       2 k / 2 k + 2 K_g
//       merged at the end: cp - 1 further outputs with their statistics, forward
//     ring-forward       (cp-1) k          (cp-1) k + cp k_g           2 k / 2 k + 2 K_g
//     all-gather         (cp-1) k          (cp-1) (k + k_g)            (cp-1) k / (cp-1) (k + K_g)
//     all-to-all         its tokens to the other ranks' heads and back: see head_exchange.cpp
//     group-cast, halo   only the rows that other ranks need, instead of (cp-1) k
//     canonical          (cp-1) k of real tokens; backward also q, d_out and statistics
//
// The transient memory grows by the copies that messages need: slices of some heads, of another
// element type, or to be added.

#include <optional>

#include "attention/plan.hpp"

namespace gyre {

/// Visible pairs of all queries, per head, for any documents.
int64_t pairs_of_all_ranks(const AttentionProblem& problem);

/// Visible pairs of the queries of one rank, per head. Returns nullopt unless the stream consists
/// of sequences of equal length S that fill their slots, and the layout has a closed form of the
/// slots that a rank owns (LayoutKind::owned):
///     contiguous, zigzag, dual-chunk-swap   any S
///     striped                               a stripe of 1 and S divisible by cp
/// Any mask is possible, except tables of regions with several sequences. The first t queries of a
/// sequence have V(t) = DocumentMask::pairs(t) pairs, so those of slots [a, b) have V(b) - V(a).
/// For rank r, one causal sequence and L = S/cp:
///     contiguous        r L² + L(L+1)/2
///     dual-chunk-swap   S(S+1) / (2 cp) on every rank
///     striped           (r+1) L(L+1)/2 + (cp-1-r) L(L-1)/2
std::optional<int64_t> visible_pairs_of(const AttentionProblem& problem, int rank);

/// Share of a ring's bytes (cp (cp-1) k over all ranks) that group-cast sends forward. It is
/// nullopt unless one causal sequence of S = cp L tokens (L even for dual-chunk-swap) fills the
/// slots, the mask has no window, cp > 1 and the layout has a form. Layout, share, rows received:
///     contiguous        1/2            all rows of lower ranks
///     dual-chunk-swap   3/4            half of the rows of lower ranks, all of higher ranks
///     striped by 1      1 - 1/(2 L)    all rows, except the last one of higher ranks
std::optional<double> needed_share(const AttentionProblem& problem);

}  // namespace gyre
