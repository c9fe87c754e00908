#include "apps/common/registry_options.hpp"

namespace gyre {
LayoutOptions LayoutChoice::for_ranks(int cp) const {
  LayoutOptions result = options;
  result.cp = cp;
  return result;
}

RegistryOptions<LayoutKind, LayoutOptions> layout_choices() {
  return {"layout", layout_kinds(), layout_option_fields()};
}

std::string layout_help() {
  return layout_choices().help("Layouts");
}

std::string segment_rule_help() {
  std::vector<std::string> rules;
  for (const LayoutKind& kind : layout_kinds())
    if (kind.chunks_per_rank > 0)
      rules.push_back(
          fmt::format("a multiple of {} under {}", multiple_text(kind.chunks_per_rank), kind.name));
  return fmt::format("{}", fmt::join(rules, ", "));
}

RegistryOptions<Schedule, ScheduleOptions> schedule_choices() {
  return {"schedule", schedules(), schedule_option_fields()};
}

std::string schedule_help() {
  return schedule_choices().help("Schedules");
}

}  // namespace gyre
