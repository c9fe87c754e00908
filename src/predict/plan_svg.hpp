#pragma once
// A picture of plans: what every rank computes, sends and waits for, when.

#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "predict/simulate.hpp"

namespace gyre {

/// An SVG with one panel for each simulated direction, all on one scale of time, and in it one band
/// for each rank:
///   - the upper lane is what it computes, coloured by the rank whose keys are used, which is also
///     written there if there is room; hatched while it waits, grey for copies and passes over
///     arrays
///   - the lower lane is what it sends, coloured by the rank whose rows they are; a thin line lasts
///     until they arrive
///   - behind the band, the share of the time in which it computes
/// Beyond 16 ranks every n-th and the slowest are drawn, and the panel says so.
std::string plan_svg(const Plan& plan, const AttentionProblem& problem,
                     const std::vector<Simulation>& directions);

}  // namespace gyre
