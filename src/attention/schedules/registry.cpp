#include "attention/schedules/registry.hpp"

#include "core/error.hpp"

namespace gyre {

const std::vector<Schedule>& schedules() {
  static const std::vector<Schedule> all = {
      {"ring", "KV blocks travel round the ring, two receive buffers, cp - 1 messages", ring_plan},
  };
  return all;
}

const Schedule& find_schedule(const std::string& name) {
  std::string names;
  for (const Schedule& schedule : schedules()) {
    if (schedule.name == name) return schedule;
    names += (names.empty() ? "" : ", ") + schedule.name;
  }
  throw_usage("no schedule '{}'; there are: {}", name, names);
}

}  // namespace gyre
