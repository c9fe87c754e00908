#pragma once
// A timeline of plans as SVG: what each rank computes, sends and waits for, and when.

#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "predict/simulate.hpp"

namespace gyre {

/// An SVG with one panel for each simulated direction, all on one time scale. A panel has one band
/// for each rank:
///   - the upper lane shows what the rank computes, coloured by the rank whose keys it uses, with
///     that rank's number if there is room; waiting is hatched, copies and passes over arrays are
///     grey
///   - the lower lane shows what the rank sends, coloured by the rank that owns the rows; a thin
///     line lasts until they arrive
///   - to the right of the band is the share of time in which the rank computes
/// Beyond 16 ranks, evenly spaced ones and the slowest are drawn, and the panel says so.
/// `assumptions` stands below the title: heads, rates, links.
std::string plan_svg(const Plan& plan, const AttentionProblem& problem,
                     const std::vector<Simulation>& directions, const std::string& assumptions);

}  // namespace gyre
