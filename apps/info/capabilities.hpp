#pragma once
// Capabilities of this build, from its registries.

#include <string>
#include <utility>
#include <vector>

namespace gyre {

/// Names of one kind, such as "schedules".
struct Capability {
  std::string sort;
  std::vector<std::string> names;
};

/// The choices of a run, without those that the build lacks.
std::vector<Capability> capabilities();

}  // namespace gyre
