#pragma once
// Plans as JSON, schema gyre-plan/1 (results/gyre-plan-1.schema.json): what `explain` prints.

#include <vector>

#include "attention/plan.hpp"
#include "core/json.hpp"
#include "predict/simulate.hpp"

namespace gyre {

inline constexpr const char* plan_schema = "gyre-plan/1";

/// One schedule under one layout. Holds the times of each simulated direction and the counts and
/// times of each rank; with `steps` also each rank's arrays and steps, in order.
Json plan_json(const Plan& plan, const AttentionProblem& problem, const ElementTypes& types,
               const std::vector<Simulation>& directions, bool steps);

}  // namespace gyre
