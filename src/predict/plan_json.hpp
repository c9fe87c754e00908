#pragma once
// Plans as JSON, schema gyre-plan/1 (results/gyre-plan-1.schema.json): what `explain` says in
// words.

#include <vector>

#include "attention/plan.hpp"
#include "core/json.hpp"
#include "predict/simulate.hpp"

namespace gyre {

inline constexpr const char* plan_schema = "gyre-plan/1";

/// One schedule under one layout: for each simulated direction its times, and for each rank counts
/// and times; with `steps` also the rank's arrays and steps, in order.
Json plan_json(const Plan& plan, const AttentionProblem& problem, const ElementTypes& types,
               const std::vector<Simulation>& directions, bool steps);

}  // namespace gyre
