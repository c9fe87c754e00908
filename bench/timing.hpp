#pragma once
// Timing of CPU benchmarks.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <vector>

#include "runtime/clock.hpp"

namespace gyre {

/// Runs the benchmark; returns the median seconds of its iterations: CPU time on one thread,
/// wall-clock time on several.
template <class Body>
double time_iterations(benchmark::State& state, int64_t threads, Body body) {
  const Stopwatch watch;
  const auto now = [&] { return threads == 1 ? thread_cpu_seconds() : watch.seconds(); };
  std::vector<double> seconds;
  for (auto _ : state) {
    const double start = now();
    body();
    seconds.push_back(now() - start);
  }
  const auto middle = seconds.begin() + std::ssize(seconds) / 2;
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

}  // namespace gyre
