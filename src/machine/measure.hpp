#pragma once
// Measures a machine: cores, memory, messages, GPUs.

#include "comm/communicator.hpp"
#include "machine/identity.hpp"
#include "machine/measured.hpp"

namespace gyre {

struct MeasureOptions {
  int threads = 1;              ///< of a rank
  double window_seconds = 0.1;  ///< of each sample of a rate, and of all samples of a message
};

/// What messages are made of and go through: `data` is what programs compute and communicate with,
/// of host or GPU memory. Its ranks are those of `world`, which is of host memory.
struct MeasuredTransport {
  Communicator& world;
  Communicator& data;
  Stream& stream;
};

/// Measures all of it; complete on rank 0, but for the time. Collective over all ranks. Takes about
/// 40 windows, and 1 GiB of memory a rank at most.
///
/// Ranks that have nothing to do sleep, and look once a millisecond whether they may go on.
MeasuredMachine measure_machine(const MachineIdentity& machine, const MeasuredTransport& transport,
                                const MeasureOptions& options);

}  // namespace gyre
