#pragma once
// The convolution of a recurrence in the plan of a rank, whatever the schedule of its states.
//
// The first tokens of a part read width - 1 tokens before it, its history, as far as the document
// has them: they come from the part before or, where parts are shorter, from several.
//
// Example: width 4, cp = 4, one document of 7 tokens and one of 1:
//
//     tokens       0 1 | 2 3 | 4 5 | 6 A
//     histories    rank 1 reads 0 1; rank 2 reads 1, and 2 3; rank 3 reads 3, and 4 5; A reads none
//
//     forward      start exchanging histories; convolve parts that begin documents; wait; convolve
//                  the others; the steps of the schedule
//     backward     the steps of the schedule; slopes; start sending gradients of histories to where
//                  these came from, and the sum of dweight over all ranks; dx of parts to which
//                  nothing is sent; wait; dx of the others, with what was sent; wait
//
// Ranks that compute whole documents in a share of the heads read no histories. They convolve
// between the two exchanges, each in its heads. Their dweight is 0 in the channels of other heads.
//
// Histories travel in the type of activations, their gradients in f32: a row of dx is rounded once.

#include "recurrence/plan.hpp"

namespace gyre {

/// Pieces of all histories, in the order of the parts that read them, then of tokens.
std::vector<HistoryPiece> history_pieces(const StateParts& parts, int64_t width);
/// Tokens in the history of a part.
int64_t history_rows(const StatePart& part, int64_t width);

/// Adds the convolution's steps, and its pieces, to the plan of a schedule.
void add_convolution(const RecurrenceProblem& problem, StatePlan& plan);

/// Messages and bytes of these steps, by formula.
struct HaloForm {
  int64_t messages = 0, bytes_sent = 0;
};
/// Messages and bytes of the all-reduce of the weights' gradient, by formula.
HaloForm weight_sum_form(const RecurrenceProblem& problem, Pass pass);
HaloForm halo_form(const RecurrenceProblem& problem, int rank, Pass pass);

}  // namespace gyre
