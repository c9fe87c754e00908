#pragma once
// The schedules as options of an app: --schedule, --inner, --heads-at-once.

#include <string>

#include "apps/common/registry_options.hpp"
#include "attention/schedules/registry.hpp"

namespace gyre {

/// At first the default schedule.
struct ScheduleChoice : RegistryChoice<ScheduleOptions> {
  ScheduleChoice() { name = default_schedule().name; }
};

/// For declaring and checking a ScheduleChoice.
RegistryOptions<Schedule, ScheduleOptions> schedule_choices();

/// Choices of an app whose masks never have a window.
RegistryOptions<Schedule, ScheduleOptions> schedule_choices_without_window();

/// A line for each schedule.
std::string schedule_help();

}  // namespace gyre
