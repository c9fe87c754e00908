#pragma once
// A timeline of plans as SVG: what each rank computes, sends and waits for, and when.

#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "predict/simulate.hpp"

namespace gyre {

/// SVG with one panel per simulated direction, all on one time scale. A panel has one band per
/// rank:
///   - the upper lane shows what the rank computes, in the colour of the rank whose keys it uses,
///     with that rank's number if there is room; waiting is hatched, copies and passes over arrays
///     are grey
///   - the lower lane shows what the rank sends, in the colour of the rank that owns the rows; a
///     thin line lasts until the message arrives
///   - the fraction of time in which the rank computes stands to the right
/// Above 16 ranks, evenly spaced ones and the slowest are drawn, and the panel says so.
/// `assumptions` (heads, rates, links) is printed below the title.
std::string plan_svg(const Plan& plan, const AttentionProblem& problem,
                     const std::vector<Simulation>& directions, const std::string& assumptions);

}  // namespace gyre
