#pragma once
// Time of a pass by phase, beside the limits of the machine.

#include <string>

#include "comm/communicator.hpp"
#include "model/decoder.hpp"
#include "model/pass_work.hpp"

namespace gyre {

/// Limits of a rank while all ranks work; 0: unknown.
struct PhaseLimits {
  double flops_per_s = 0;    ///< of products
  double bytes_per_s = 0;    ///< of a copy, read plus written
  std::string product = {};  ///< how flops_per_s was measured
};

/// Measures f32 multiply-adds on registers on the host; on a device, a product of square matrices
/// of `type`. Measures memory on arrays of about `bytes`. Collective.
PhaseLimits measure_limits(DType type, int64_t bytes, Stream& stream, Communicator& world);

/// Returns the time of a pass at the limits, phase after phase, as a maximum over ranks, over
/// `pass_ms`; NaN if a limit is unknown. Collective.
double share_of_limit(const PassWork& work, const PhaseLimits& limits, double pass_ms,
                      Communicator& world);

/// A "#" table of the phases of the last pass: time on the slowest rank, share of the pass, and
/// rate on the slowest rank with its share of the limit. `last_ms`: time of the last pass on this
/// rank. Collective.
std::string phases_text(const DecoderTimes& times, const PassWork& work, const PhaseLimits& limits,
                        double last_ms, Communicator& world);

}  // namespace gyre
