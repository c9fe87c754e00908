#pragma once
// What this build can do, from its registries.

#include <string>
#include <utility>
#include <vector>

namespace gyre {

/// Names of one sort: "schedules".
struct Capability {
  std::string sort;
  std::vector<std::string> names;
};

/// What a run can choose from. What the build lacks is left out.
std::vector<Capability> capabilities();

}  // namespace gyre
