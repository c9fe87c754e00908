#pragma once
// The machine that predictions assume: a few rates and latencies.

#include <limits>

namespace gyre {

/// A machine of equal ranks. A rate may be infinite: what it limits then takes no time.
struct MachineModel {
  double flops_per_s = std::numeric_limits<double>::infinity();  ///< of one rank's kernel
  double latency_s = 0;                                          ///< of a message
  double bytes_per_s = std::numeric_limits<double>::infinity();  ///< egress of one rank
  int ranks_per_node = 0;     ///< consecutive ranks share a node; 0: all links are alike
  double node_latency_s = 0;  ///< of a message inside a node
  double node_bytes_per_s = std::numeric_limits<double>::infinity();  ///< on a link of its own
  double copy_bytes_per_s = std::numeric_limits<double>::infinity();  ///< packing, adding, clearing
};

/// Throws a usage error that names the first invalid number: rates must be positive, latencies
/// finite and at least 0, ranks_per_node at least 0.
void check_machine(const MachineModel& machine);

}  // namespace gyre
