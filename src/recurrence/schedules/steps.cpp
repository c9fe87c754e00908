#include "recurrence/schedules/steps.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

namespace gyre {

StatePlan empty_state_plan(const RecurrenceProblem& problem, int rank) {
  StatePlan plan;
  plan.rank = rank;
  plan.type = problem.type;
  plan.parts = problem.parts.of_rank.at(rank);
  return plan;
}

int add_buffer(StatePlan& plan, StateKind kind) {
  plan.buffers.push_back(kind);
  return static_cast<int>(plan.buffers.size()) - 1;
}

void run_whole_documents(const StatePlan& plan, std::vector<StateStep>& steps) {
  for (int part = 0; part < std::ssize(plan.parts); ++part) {
    if (plan.parts[part].places > 1) continue;
    state_step::Run run;
    run.part = part;
    steps.emplace_back(run);
  }
}

int place_of(const StatePart& part, Pass pass) {
  return pass == Pass::forward ? part.place : part.places - 1 - part.place;
}

std::vector<int> parts_by_place(const StatePlan& plan, Pass pass) {
  std::vector<int> order;
  for (int part = 0; part < std::ssize(plan.parts); ++part) order.push_back(part);
  std::ranges::sort(order, {}, [&](int part) {
    return std::tuple(place_of(plan.parts[part], pass), plan.parts[part].document);
  });
  return order;
}

std::string state_refusal(const RecurrenceProblem& problem) {
  const Layout& layout = *problem.layout;
  for (int rank = 0; rank < layout.cp(); ++rank) {
    for (const Fragment& f : layout.shard(rank).fragments)
      if (f.stride != 1 && f.length > 1)
        return fmt::format(
            "under {} rank {} has one in {} tokens of document {}; states pass between runs of "
            "consecutive tokens",
            layout.name, rank, f.stride, f.segment);
    const auto crossing = std::ranges::count_if(
        problem.parts.of_rank[rank], [](const StatePart& part) { return part.places > 1; });
    if (crossing > most_crossing_parts)
      return fmt::format(
          "under {} rank {} has {} parts of documents that go on elsewhere; at most {}, as each "
          "needs a map and states of all heads",
          layout.name, rank, crossing, most_crossing_parts);
  }
  return "";
}

int64_t maps_of_chains(const RecurrenceProblem& problem) {
  return std::max<int64_t>(0, problem.parts.longest_chain() - 2);
}

}  // namespace gyre
