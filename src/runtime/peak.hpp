#pragma once
// Limits of the core that a thread runs on, measured.

#include <span>

namespace gyre {

/// f32 FLOP/s of one core in a loop of independent fused multiply-adds on registers, with AVX-512
/// if the processor has it, else AVX2; 0 with neither. An FMA counts as two. The best of twenty
/// runs, about 5 ms each of CPU time, measured once per process.
double measured_fma_peak();

/// Bytes/s at which one core reads this array, the best of ten times; 0 without AVX2.
double measured_read_rate(std::span<const float> array);

}  // namespace gyre
