#pragma once
// Communication of small host arrays over a communicator of device memory: each array is copied to
// the device, communicated there, and copied back. It serves values that the host computes row by
// row in a run whose ranks communicate between devices.

#include <memory>

#include "comm/communicator.hpp"

namespace gyre {

/// Returns a communicator of host memory over `device`, which must outlive it; both count its
/// traffic. The copies are submitted to `stream`. Operations complete in test() or wait().
std::unique_ptr<Communicator> make_host_staging_communicator(Communicator& device, Stream& stream);

}  // namespace gyre
