#pragma once
// What memory and cores can do while all ranks use theirs: what results are compared with.

#include <cstdint>

#include "comm/communicator.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// What this rank's memory and cores, or its GPU's memory, can do while those of all other ranks do
/// the same; the slowest rank's, 0: unknown.
struct MachineRates {
  double read = 0, update = 0, copy = 0;  ///< bytes/s, read and written ones together
  double fill = 0;                        ///< of a GPU
  double flops = 0;                       ///< f32 multiply-adds, FLOP/s
  int64_t array_bytes = 0;                ///< what memory was measured with
};
/// Calls on fewer bytes take less time than what surrounds them: no rate of memory is their limit.
inline constexpr int64_t least_measured_bytes = int64_t{1} << 20;
/// Measured on arrays of about `bytes`, at most 64 MiB: what fits caches is compared with caches.
/// Rates of memory are unknown below least_measured_bytes. Collective.
MachineRates measure_rates(int64_t bytes, int threads, Communicator& world);
/// The same of the memory of `stream`: of a GPU's, copies and fills, on arrays of at most 512 MiB,
/// by its own marks. `world` is of host memory.
MachineRates measure_rates(int64_t bytes, int threads, Communicator& world, Stream& stream);

}  // namespace gyre
