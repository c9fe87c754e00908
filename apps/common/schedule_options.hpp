#pragma once
// The schedules as options of an app: --schedule, --inner, --heads-at-once.

#include <string>

#include "apps/common/registry_options.hpp"
#include "attention/schedules/registry.hpp"

namespace gyre {

/// A chosen schedule; initially the default.
struct ScheduleChoice : RegistryChoice<ScheduleOptions> {
  ScheduleChoice() { name = default_schedule().name; }
};

/// Declares and checks a ScheduleChoice.
RegistryOptions<Schedule, ScheduleOptions> schedule_choices();

/// Choices of an app whose masks never have a window.
RegistryOptions<Schedule, ScheduleOptions> schedule_choices_without_window();

/// A line for each schedule.
std::string schedule_help();

}  // namespace gyre
