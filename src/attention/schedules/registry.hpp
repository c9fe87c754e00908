#pragma once
// The schedules that exist, by name. A new schedule is one file here that returns a Plan, and one
// line in registry.cpp.

#include <string>
#include <vector>

#include "attention/plan.hpp"

namespace gyre {

using ScheduleFunction = Plan (*)(const Layout& layout, MaskKind mask);

struct Schedule {
  std::string name;
  std::string summary;
  ScheduleFunction plan;
};

const std::vector<Schedule>& schedules();

/// Throws a usage error that lists the names when there is none such.
const Schedule& find_schedule(const std::string& name);

/// Ring: keys and values travel from rank to rank + 1; see ring.cpp.
Plan ring_plan(const Layout& layout, MaskKind mask);

}  // namespace gyre
