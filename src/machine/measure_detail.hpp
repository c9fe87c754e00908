#pragma once
// The parts of measure_machine.

#include "machine/measure.hpp"

namespace gyre::detail {

inline constexpr int samples_of_a_rate = 3;
inline constexpr int samples_of_a_message = 10;

/// A barrier at which ranks sleep instead of polling.
void sleep_until_all_are_here(Communicator& world);

/// Cores and memory. Collective; complete on rank 0.
MeasuredRates measure_core_rates(const MachineIdentity& machine, Communicator& world,
                                 const MeasureOptions& options);

/// Messages. Collective; complete on rank 0.
MeasuredMessages measure_messages(const MachineIdentity& machine,
                                  const MeasuredTransport& transport, double window_seconds);

}  // namespace gyre::detail
