#pragma once
// Communication of small arrays of host memory over a communicator of device memory: they are
// copied to the device, communicated there, and copied back. For what is computed on the host row
// by row, where a device's communicator is all there is.

#include <memory>

#include "comm/communicator.hpp"

namespace gyre {

/// A communicator of host memory over `device`, which must outlive it; its traffic is counted by
/// both. `stream` is where the copies are made; every operation is complete when its wait()
/// returns.
std::unique_ptr<Communicator> make_host_staging_communicator(Communicator& device, Stream& stream);

}  // namespace gyre
