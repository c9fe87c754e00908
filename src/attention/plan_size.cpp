#include "attention/plan_size.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <variant>

#include "attention/schedules/registry.hpp"
#include "core/error.hpp"

namespace gyre {
namespace {

int64_t entries_of(const RankPlan& plan) {
  int64_t entries = 0;
  for (const PlanArray& array : plan.arrays) entries += 1 + std::ssize(array.rows);
  for (const std::vector<Step>* steps : {&plan.forward, &plan.backward})
    for (const Step& step : *steps) {
      ++entries;
      if (const auto* compute = std::get_if<step::Compute>(&step))
        entries += std::ssize(compute->rectangles);
      if (const auto* exchange = std::get_if<step::Exchange>(&step))
        for (const auto* messages : {&exchange->sends, &exchange->recvs})
          for (const Message& message : *messages) entries += 1 + std::ssize(message.slices);
    }
  return entries;
}

}  // namespace

int64_t estimated_entries(const Schedule& schedule, const AttentionProblem& problem) {
  const int cp = problem.layout->cp();
  int64_t most = 0;
  for (const int rank : std::set{0, cp / 2, cp - 1})
    most = std::max(most, entries_of(plan_rank(schedule, problem, rank)));
  return most * cp;
}

void check_plan_size(const PlannedRequest& asked, int64_t most,
                     const std::function<int64_t(int ranks)>& estimate) {
  for (int works = 0; works < asked.cp;) {
    const int ranks = std::min(works == 0 ? 64 : 2 * works, asked.cp);
    const int64_t entries = estimate(ranks);
    if (entries > most)
      throw_usage(
          "--cp {}: the plans of all ranks under {} are too large to be {} ({} ranks, {} tokens: "
          "about {} steps, messages and rectangles, at most {}); {}",
          asked.cp, asked.schedule.name, asked.purpose, ranks, asked.tokens, entries, most,
          works > 0 ? fmt::format("{} ranks work", works)
                    : fmt::format("about {:.0f} tokens work",
                                  std::floor(asked.tokens * static_cast<double>(most) / entries)));
    works = ranks;
  }
}

}  // namespace gyre
