#pragma once
// An entry of the schedule registry; each schedule is defined in one file.

#include <optional>
#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "core/option_field.hpp"

namespace gyre {

/// The PlanCount of one pass of one rank's plan, by formula.
struct ClosedForm {
  /// Unset if the pairs have no formula (visible_pairs_of in attention/closed_forms.hpp).
  std::optional<int64_t> pairs;
  int64_t messages = 0;
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  int64_t transient_bytes = 0;
};

/// Arguments of a closed form: one pass of one rank. The referenced objects must outlive it.
struct FormContext {
  const AttentionProblem& problem;
  const ElementTypes& types;
  int rank = 0;
  Pass pass = Pass::forward;
  bool forward() const { return pass == Pass::forward; }
  /// Rows of the rank's own array of this kind.
  int64_t slots(ArrayKind kind) const { return problem.layout_of(kind).shard(rank).slots; }
  int64_t kv_heads() const { return problem.heads.kv_heads; }
};

/// An entry of the registry. `plan` and `closed_form` are references, which cannot be left out.
struct Schedule {
  std::string name;
  std::string summary;
  /// The plan of one rank, both passes. Precondition: why_not() is empty.
  RankPlan (&plan)(const AttentionProblem& problem, int rank);
  /// Expected count() of that plan, without reading its steps. Precondition: why_not() is empty.
  ClosedForm (&closed_form)(const FormContext& context);
  /// Says why this schedule cannot solve the problem, and names the nearest that it can solve; ""
  /// if it can. A null pointer refuses no problem.
  std::string (*refusal)(const AttentionProblem& problem) = nullptr;
  /// Members of ScheduleOptions that plan and refusal read.
  std::vector<int64_t ScheduleOptions::*> reads = {};
  /// Whether a prediction may name it the fastest. Not if it is for checks: its kernel takes tiles
  /// of one size, whose time nobody models.
  bool competes = true;

  /// The text of refusal(); "" if refusal is null.
  std::string why_not(const AttentionProblem& problem) const {
    return refusal == nullptr ? "" : refusal(problem);
  }
};

/// Whether the options ask for collectives of the communication library.
inline bool by_library(const AttentionProblem& problem) {
  return problem.options.collectives == 1;
}

/// Whether the options ask for partial outputs that are merged after the last one.
inline bool merges_at_end(const AttentionProblem& problem) {
  return problem.options.merge == 1;
}

/// Members of ScheduleOptions, each with its option name in apps.
const std::vector<OptionField<ScheduleOptions>>& schedule_option_fields();

}  // namespace gyre
