#pragma once
// Load of a run's hosts, and the part that other processes cause.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.hpp"

namespace gyre {

/// CPU time on this host since boot, of all processes and of this process with its ended children.
struct HostLoad {
  double wall_seconds = 0;  ///< on the monotonic clock
  double busy_seconds = 0;  ///< of all cores, including time taken by a hypervisor; NaN: unknown
  double own_seconds = 0;
  int64_t cores = 0;
};
HostLoad host_load();

/// Number of cores kept busy by processes other than the ranks, between two samples.
struct ForeignLoad {
  std::string host;
  double cores = 0;  ///< NaN: unknown, or an interval below 0.1 s
  int64_t of_cores = 0;
};
/// Returns the highest load of any host. `hosts`: host of each rank. Collective.
ForeignLoad foreign_load(Communicator& world, const std::vector<std::string>& hosts,
                         const HostLoad& begin, const HostLoad& end);

}  // namespace gyre
