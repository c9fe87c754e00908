#pragma once
// Memory and core rates while all ranks use them, for comparison with results.

#include <cstdint>

#include "comm/communicator.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Rates of this rank's memory and cores, or of its GPU's memory, while all ranks measure; minimum
/// over the ranks; 0: unknown.
struct MachineRates {
  double read = 0, update = 0, copy = 0;  ///< bytes/s, read plus written
  double fill = 0;                        ///< GPU memory only, bytes/s
  double flops = 0;                       ///< f32 multiply-adds, FLOP/s
  int64_t array_bytes = 0;                ///< size of the measured array
};
/// Below this, a call's overhead exceeds its memory time, so no memory rate limits it.
inline constexpr int64_t least_measured_bytes = int64_t{1} << 20;
/// Measures on arrays of about `bytes`, at most 64 MiB, so that data that fit in caches are
/// compared with cache rates. Memory rates are unknown below least_measured_bytes. Collective.
MachineRates measure_rates(int64_t bytes, int threads, Communicator& world);
/// Measures the memory of `stream`. For GPU memory: copies and fills on arrays of at most 512 MiB,
/// timed by marks on the stream. `world` is in host memory.
MachineRates measure_rates(int64_t bytes, int threads, Communicator& world, Stream& stream);

}  // namespace gyre
