#include "predict/machine.hpp"

#include <cmath>

#include "core/error.hpp"

namespace gyre {

void check_machine(const MachineModel& machine) {
  const auto rate = [](const char* name, double value) {
    if (!(value > 0)) throw_usage("{} of {}; wanted: more than 0", name, value);
  };
  const auto latency = [](const char* name, double value) {
    if (!(value >= 0) || std::isinf(value))
      throw_usage("{} of {} s; wanted: 0 or more", name, value);
  };
  rate("flops_per_s", machine.flops_per_s);
  rate("bytes_per_s", machine.bytes_per_s);
  rate("node_bytes_per_s", machine.node_bytes_per_s);
  rate("copy_bytes_per_s", machine.copy_bytes_per_s);
  latency("latency", machine.latency_s);
  latency("node_latency", machine.node_latency_s);
  if (machine.ranks_per_node < 0)
    throw_usage("{} ranks per node; wanted: 1 or more, or 0 for one kind of link",
                machine.ranks_per_node);
}

}  // namespace gyre
