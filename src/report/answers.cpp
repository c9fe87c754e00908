#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "report/result.hpp"

namespace gyre {
namespace {

using Group = std::pair<std::string, std::vector<std::string>>;

/// Names of the answers that were not compared, grouped by reason in order of first occurrence.
std::vector<Group> groups_of(const std::vector<AnswerUse>& uses, bool only_asked) {
  std::vector<Group> groups;
  for (const AnswerUse& use : uses) {
    if (use.why_not.empty() || (only_asked && !use.was_asked)) continue;
    const auto same = std::ranges::find(groups, use.why_not, &Group::first);
    Group& group = same == groups.end() ? groups.emplace_back(use.why_not, Group().second) : *same;
    group.second.push_back(use.name);
  }
  return groups;
}

}  // namespace

std::string answers_text(const std::string& generator, const std::vector<AnswerUse>& uses) {
  std::vector<std::string> compared, others;
  for (const AnswerUse& use : uses)
    if (use.why_not.empty()) compared.push_back(use.name);
  for (const auto& [reason, names] : groups_of(uses, false))
    others.push_back(fmt::format("{} ({})", fmt::join(names, ", "), reason));
  return fmt::format(
      "# reference{}: compared in full: {}{}\n", generator.empty() ? "" : " by " + generator,
      compared.empty() ? "nothing" : fmt::format("{}", fmt::join(compared, ", ")),
      others.empty() ? "" : fmt::format("; not compared: {}", fmt::join(others, ", ")));
}

void judge_answers(RunReport& report, const std::vector<AnswerUse>& uses) {
  for (const auto& [reason, names] : groups_of(uses, true))
    report.unverified_reasons.push_back(
        fmt::format("answers not compared: {}: {}", fmt::join(names, ", "), reason));
}

}  // namespace gyre
