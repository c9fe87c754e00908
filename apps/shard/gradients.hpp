#pragma once
// The gradient of a gathered stream by each convention (GatherGradient, sharding/distributed.hpp).

#include <string>

#include "apps/shard/report.hpp"

namespace gyre {

/// Adds checks to `checks`, for every bin and the convention of this name ("split", "sum", "none",
/// or "all"). A rank's gradient is that of its own slots (split), the sum of all ranks' gradients
/// at its slots (sum), or zero (none). It is zero at padding of the layout. Returns a "#" line per
/// convention with the bytes that all ranks sent. Throws a usage error unless the run has as many
/// ranks as the layout. Collective.
std::string check_gather_gradients(ShardingPlan& plan, const std::string& convention,
                                   Communicator& world, Verification& checks);

}  // namespace gyre
