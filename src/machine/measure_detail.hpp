#pragma once
// Parts of measure_machine.

#include "machine/measure.hpp"

namespace gyre::detail {

inline constexpr int samples_of_a_rate = 3;
inline constexpr int samples_of_a_message = 10;

/// A barrier in which ranks sleep instead of polling continuously.
void sleep_until_all_are_here(Communicator& world);

/// Measures cores and memory. Collective; complete on rank 0.
MeasuredRates measure_core_rates(const MachineIdentity& machine, Communicator& world,
                                 const MeasureOptions& options);

/// Measures messages. Collective; complete on rank 0.
MeasuredMessages measure_messages(const MachineIdentity& machine,
                                  const MeasuredTransport& transport, double window_seconds);

}  // namespace gyre::detail
