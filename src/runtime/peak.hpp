#pragma once
// Measured limits of the core that a thread runs on.

#include <span>

namespace gyre {

/// f32 FLOP/s of one core in a loop of independent fused multiply-adds on registers, with AVX-512
/// if the processor has it, else AVX2; 0 with neither. An FMA counts as two. The best of twenty
/// runs, about 5 ms each of CPU time, measured once per process.
double measured_fma_peak();

// Memory bandwidth, in bytes/s, that `threads` threads reach together on the given arrays: the best
// of ten passes, in CPU time with one thread and in wall-clock time with more; 0 without AVX2. The
// arrays should be much larger than the caches.

/// Reading.
double measured_read_rate(std::span<const float> array, int threads = 1);

/// Changing the sign of every element in place (ten times, so that it is as it was): bytes read and
/// bytes written both count.
double measured_update_rate(std::span<float> array, int threads = 1);

/// Copying to an array of the same size with non-temporal stores (aligned to 32 bytes): bytes read
/// and bytes written both count.
double measured_copy_rate(std::span<const float> from, std::span<float> to, int threads = 1);

/// What cores can be asked to do as fast as they can.
enum class CoreWork {
  fma,     ///< f32 multiply-adds on registers, for some milliseconds
  read,    ///< an array, once
  update,  ///< each of its elements, once
  copy,    ///< its first half to its second half, with non-temporal stores
};

/// Does it once with `threads` threads, which share the array (a multiple of 128 bytes, aligned to
/// 32). Returns FLOPs or bytes; as above, a multiply-add counts as two, and bytes read and written
/// both count. 0 without AVX2.
double do_core_work(CoreWork work, std::span<float> array, int threads);

}  // namespace gyre
