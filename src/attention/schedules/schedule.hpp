#pragma once
// What a schedule is: one entry of the registry, made in one file.

#include <optional>
#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "core/option_field.hpp"

namespace gyre {

/// What count() should say of one direction of one rank's plan, by formula.
struct ClosedForm {
  /// As PlanCount::pairs; none where visible_pairs_of has none.
  std::optional<int64_t> pairs;
  int64_t messages = 0;
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  int64_t transient_bytes = 0;
};

/// What a closed form is of: one direction of one rank. Refers to its parts, which must outlive it.
struct FormContext {
  const AttentionProblem& problem;
  const ElementTypes& types;
  int rank = 0;
  Pass pass = Pass::forward;
  bool forward() const { return pass == Pass::forward; }
  int64_t slots() const { return problem.layout->shard(rank).slots; }
  int64_t kv_heads() const { return problem.heads.kv_heads; }
};

/// References have no default: a schedule without a plan or without a closed form does not compile.
struct Schedule {
  std::string name;
  std::string summary;
  /// The plan of one rank, both directions. Any problem for which why_not() is empty.
  RankPlan (&plan)(const AttentionProblem& problem, int rank);
  /// What count() says of that plan, without looking at a step. The same problems.
  ClosedForm (&closed_form)(const FormContext& context);
  /// Why this schedule cannot do the problem, with the nearest that it can; "" when it can. Null:
  /// it can do all.
  std::string (*refusal)(const AttentionProblem& problem) = nullptr;
  /// It does causal masks with a window alone.
  bool needs_window = false;
  /// The members of ScheduleOptions that plan and refusal read.
  std::vector<int64_t ScheduleOptions::*> reads = {};

  /// refusal(), "" where there is none.
  std::string why_not(const AttentionProblem& problem) const {
    return refusal == nullptr ? "" : refusal(problem);
  }
};

/// Whether the options ask for the library's collectives.
inline bool by_library(const AttentionProblem& problem) {
  return problem.options.collectives == 1;
}

/// Every member of ScheduleOptions, by the name under which apps offer it.
const std::vector<OptionField<ScheduleOptions>>& schedule_option_fields();

}  // namespace gyre
