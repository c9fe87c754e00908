#pragma once
// Timing of the CPU benchmarks.

#include <benchmark/benchmark.h>

#include "runtime/clock.hpp"

namespace gyre {

/// Runs the benchmark; seconds per iteration, of CPU time on one thread and of wall-clock time on
/// more.
template <class Body>
double time_iterations(benchmark::State& state, int64_t threads, Body body) {
  const Stopwatch watch;
  const double start = thread_cpu_seconds();
  for (auto _ : state) body();
  const double seconds = threads == 1 ? thread_cpu_seconds() - start : watch.seconds();
  return seconds / static_cast<double>(state.iterations());
}

}  // namespace gyre
