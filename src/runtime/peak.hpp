#pragma once
// Measured limits of the core that a thread runs on.

#include <span>

namespace gyre {

/// f32 FLOP/s of one core in a loop of independent fused multiply-adds on registers, with AVX-512
/// if the processor has it, else AVX2; 0 with neither. An FMA counts as two. The best of 40 runs of
/// about 0.3 ms of CPU time each, measured once per process.
double measured_fma_peak();

// Memory bandwidth, in bytes/s, of `threads` threads together on the given arrays: the best of ten
// passes, in CPU time for one thread and in wall-clock time for more; 0 without AVX2. The arrays
// should be much larger than the caches.

/// Bandwidth of reading.
double measured_read_rate(std::span<const float> array, int threads = 1);

/// Bandwidth of changing the sign of every element in place, ten times, so that the array is
/// unchanged; counts bytes read and bytes written.
double measured_update_rate(std::span<float> array, int threads = 1);

/// Bandwidth of copying to an array of the same size with non-temporal stores (aligned to 32
/// bytes); counts bytes read and bytes written.
double measured_copy_rate(std::span<const float> from, std::span<float> to, int threads = 1);

/// Workloads that run a core at one of its limits.
enum class CoreWork {
  fma,     ///< f32 multiply-adds on registers, for some milliseconds
  read,    ///< reads an array once
  update,  ///< updates each element of an array once
  copy,    ///< copies the first half to the second half, with non-temporal stores
};

/// Runs `work` once with `threads` threads, which share the array (a multiple of 128 bytes, aligned
/// to 32). Returns FLOPs or bytes, counted as above: two per multiply-add, bytes read plus bytes
/// written. 0 without AVX2.
double do_core_work(CoreWork work, std::span<float> array, int threads);

}  // namespace gyre
