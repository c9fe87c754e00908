#pragma once
// How busy the hosts of a run are, and how much of that is not the run's.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.hpp"

namespace gyre {

/// CPU time on this host since its start, of all processes and of this one (with its children that
/// have ended).
struct HostLoad {
  double wall_seconds = 0;  ///< monotonic
  double busy_seconds = 0;  ///< of all cores, and what a hypervisor took; NaN: unknown
  double own_seconds = 0;
  int64_t cores = 0;
};
HostLoad host_load();

/// Cores that processes other than the ranks kept busy, between two moments.
struct ForeignLoad {
  std::string host;
  double cores = 0;  ///< NaN: unknown, or less than 0.1 s
  int64_t of_cores = 0;
};
/// Of the host that had most of it. `hosts`: of all ranks. Collective.
ForeignLoad foreign_load(Communicator& world, const std::vector<std::string>& hosts,
                         const HostLoad& begin, const HostLoad& end);

}  // namespace gyre
