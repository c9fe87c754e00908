#pragma once
// Measures a machine: cores, memory, messages, GPUs.

#include "comm/communicator.hpp"
#include "machine/identity.hpp"
#include "machine/measured.hpp"

namespace gyre {

struct MeasureOptions {
  int threads = 1;              ///< per rank
  double window_seconds = 0.1;  ///< of each sample of a rate; of all samples of a message
};

/// Communicators of a measurement: programs compute and communicate with `data`, in host or GPU
/// memory. `world` has the same ranks, in host memory.
struct MeasuredTransport {
  Communicator& world;
  Communicator& data;
  Stream& stream;
};

/// Measures everything except the time stamp; the result is complete on rank 0. Collective over all
/// ranks. Takes about 40 windows and at most 1 GiB of memory per rank.
///
/// Idle ranks sleep and poll once per millisecond.
MeasuredMachine measure_machine(const MachineIdentity& machine, const MeasuredTransport& transport,
                                const MeasureOptions& options);

}  // namespace gyre
