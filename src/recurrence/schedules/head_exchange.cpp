// Ranks exchange tokens for heads (DeepSpeed Ulysses, arXiv 2309.14509): each computes whole
// documents in its share of the heads, and no state passes.
//
// Forward:
//
//     all-to-all of q, k, v, g, beta: the rows of all ranks, in this rank's heads
//     every document, from state 0
//     all-to-all of out: this rank's rows, in all heads
//
// Backward exchanges the gradient of out and, back, the gradients of the inputs, which are kept from
// forward. A convolution runs after the first exchange, in the rank's own heads. Rows are put in the
// order of documents when they arrive, so that any layout will do. If no document is on several
// ranks, nothing is sent and every rank computes its documents in all heads.
//
// Example, cp = 2, 4 heads of values over 2 of keys: rank 0 computes head 0 of keys with the heads 0
// and 1 of values, rank 1 the others, each for the tokens of both ranks.

#include <fmt/format.h>

#include <algorithm>

#include "recurrence/schedules/list.hpp"
#include "recurrence/schedules/steps.hpp"

namespace gyre {
namespace {

using namespace state_step;
using Arrays = std::vector<RecurrenceArray>;

/// The arrays among `wanted` that a recurrence of this shape has.
Arrays present(const RecurrenceShape& shape, Arrays wanted) {
  std::erase_if(wanted, [&](RecurrenceArray array) { return !has_array(shape, array); });
  return wanted;
}

/// The arrays that a pass sends to the ranks of heads or, with `home`, back to the tokens' ranks.
Arrays sent(const RecurrenceShape& shape, Pass pass, bool home) {
  using enum RecurrenceArray;
  if (pass == Pass::forward) return home ? Arrays{out} : present(shape, {q, k, v, g, beta});
  return home ? present(shape, {d_q, d_k, d_v, d_g, d_beta}) : Arrays{d_out};
}

int64_t tokens_of(const std::vector<StatePart>& parts) {
  int64_t tokens = 0;
  for (const StatePart& part : parts) tokens += part.tokens;
  return tokens;
}

StatePlan plan(const RecurrenceProblem& problem, int rank) {
  StatePlan plan = empty_state_plan(problem, rank);
  const bool crosses = problem.parts.crosses();
  if (crosses) {
    plan.parts = whole_documents(*problem.layout);
    for (const auto& of_rank : problem.parts.of_rank)
      plan.rank_tokens.push_back(tokens_of(of_rank));
  }
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    std::vector<StateStep>& steps = pass == Pass::forward ? plan.forward : plan.backward;
    const auto exchange = [&](int id, bool home) {
      if (!crosses) return;
      steps.emplace_back(HeadExchange{id, sent(problem.shape, pass, home), home});
      steps.emplace_back(Wait{id});
    };
    exchange(0, false);
    run_whole_documents(plan, steps);
    exchange(1, true);
  }
  return plan;
}

/// Bytes of a token in the heads of one rank.
int64_t bytes_of(const RecurrenceProblem& problem, Pass pass, bool home) {
  int64_t bytes = 0;
  for (const RecurrenceArray array : sent(problem.shape, pass, home))
    bytes += width_of(problem.shape, array) / problem.cp() *
             static_cast<int64_t>(size_of(stored_type(array, problem.type)));
  return bytes;
}

StateForm closed_form(const RecurrenceProblem& problem, int rank, Pass pass) {
  if (!problem.parts.crosses()) return {};
  const int64_t own = tokens_of(problem.parts.of_rank[rank]),
                all = tokens_of(whole_documents(*problem.layout));
  return {2, (problem.cp() - 1) * own * bytes_of(problem, pass, false) +
                 (all - own) * bytes_of(problem, pass, true)};
}

int64_t maps(const RecurrenceProblem&) {
  return 0;
}

std::string why_not(const RecurrenceProblem& problem) {
  const int64_t heads = problem.shape.key_heads, cp = problem.cp();
  if (!problem.parts.crosses()) return "";
  if (heads % cp == 0) return "";
  int64_t below = std::min(cp, heads), above = cp;
  while (heads % below != 0) --below;
  while (above < heads && heads % above != 0) ++above;
  const std::string nearest =
      above <= heads ? fmt::format("{} and {}", below, above) : fmt::format("{}", below);
  return fmt::format(
      "{} heads of keys cannot be divided among {} ranks; the nearest that divide them: {}", heads,
      cp, nearest);
}

}  // namespace

StateSchedule head_exchange_schedule() {
  return {.name = "head-exchange",
          .summary = "tokens are exchanged for heads, whose documents are whole",
          .plan = plan,
          .closed_form = closed_form,
          .maps = maps,
          .why_not = why_not,
          .whole_documents = true};
}

}  // namespace gyre
