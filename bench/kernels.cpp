// The CPU kernels against the limits of the core they run on, which the same program measures: the
// FMA rate of a register-only loop, and the rate at which the very same array can be read.
//
// Rates are per second of CPU time, so that a shared machine disturbs them less.

#include <benchmark/benchmark.h>
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "logprobs/row_statistics.hpp"
#include "model/elementwise.hpp"
#include "runtime/buffer.hpp"
#include "runtime/clock.hpp"
#include "runtime/gemm.hpp"

namespace gyre {
namespace {

/// Fastest of some repetitions, seconds.
double fastest(int repetitions, const std::function<void()>& body) {
  double best = HUGE_VAL;
  for (int i = 0; i < repetitions; ++i) {
    const double start = thread_cpu_seconds();
    body();
    best = std::min(best, thread_cpu_seconds() - start);
  }
  return best;
}

// Twelve separate accumulators hide the latency of FMA; g++ 12 would keep an array of them in
// memory.
#define GYRE_TWELVE_FMAS(fma)                                                     \
  r0 = fma(r0, a, b), r1 = fma(r1, a, b), r2 = fma(r2, a, b), r3 = fma(r3, a, b), \
  r4 = fma(r4, a, b), r5 = fma(r5, a, b), r6 = fma(r6, a, b), r7 = fma(r7, a, b), \
  r8 = fma(r8, a, b), r9 = fma(r9, a, b), r10 = fma(r10, a, b), r11 = fma(r11, a, b)
constexpr int64_t fma_loops = 1'000'000;

__attribute__((target("avx512f"))) void fma_loop_avx512() {
  const __m512 a = _mm512_set1_ps(0.999F), b = _mm512_set1_ps(0.001F);
  __m512 r0 = _mm512_set1_ps(0), r1 = _mm512_set1_ps(1), r2 = _mm512_set1_ps(2),
         r3 = _mm512_set1_ps(3);
  __m512 r4 = _mm512_set1_ps(4), r5 = _mm512_set1_ps(5), r6 = _mm512_set1_ps(6),
         r7 = _mm512_set1_ps(7);
  __m512 r8 = _mm512_set1_ps(8), r9 = _mm512_set1_ps(9), r10 = _mm512_set1_ps(10),
         r11 = _mm512_set1_ps(11);
  for (int64_t i = 0; i < fma_loops; ++i) GYRE_TWELVE_FMAS(_mm512_fmadd_ps);
  __m512 sum = r0 + r1 + r2 + r3 + r4 + r5 + r6 + r7 + r8 + r9 + r10 + r11;
  benchmark::DoNotOptimize(sum);
}

__attribute__((target("avx2,fma"))) void fma_loop_avx2() {
  const __m256 a = _mm256_set1_ps(0.999F), b = _mm256_set1_ps(0.001F);
  __m256 r0 = _mm256_set1_ps(0), r1 = _mm256_set1_ps(1), r2 = _mm256_set1_ps(2),
         r3 = _mm256_set1_ps(3);
  __m256 r4 = _mm256_set1_ps(4), r5 = _mm256_set1_ps(5), r6 = _mm256_set1_ps(6),
         r7 = _mm256_set1_ps(7);
  __m256 r8 = _mm256_set1_ps(8), r9 = _mm256_set1_ps(9), r10 = _mm256_set1_ps(10),
         r11 = _mm256_set1_ps(11);
  for (int64_t i = 0; i < fma_loops; ++i) GYRE_TWELVE_FMAS(_mm256_fmadd_ps);
  __m256 sum = r0 + r1 + r2 + r3 + r4 + r5 + r6 + r7 + r8 + r9 + r10 + r11;
  benchmark::DoNotOptimize(sum);
}

/// f32 FMA peak of this core, FLOP/s; 0 when the processor has neither AVX-512 nor AVX2.
double peak_flops() {
  static const double peak = [] {
    const bool wide = __builtin_cpu_supports("avx512f") != 0;
    if (!wide && !(__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0))
      return 0.0;
    const double flops = 12.0 * 2.0 * (wide ? 16.0 : 8.0) * static_cast<double>(fma_loops);
    return flops / fastest(20, wide ? fma_loop_avx512 : fma_loop_avx2);
  }();
  return peak;
}

__attribute__((target("avx2"))) void read_all(const float* x, int64_t count) {
  __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
  for (int64_t i = 0; i + 32 <= count; i += 32) {
    a += _mm256_loadu_ps(x + i);
    b += _mm256_loadu_ps(x + i + 8);
    c += _mm256_loadu_ps(x + i + 16);
    d += _mm256_loadu_ps(x + i + 24);
  }
  a += b + c + d;
  benchmark::DoNotOptimize(a);
}

/// Bytes/s at which one core reads this array; 0 without AVX2.
double read_rate(std::span<const float> x) {
  if (__builtin_cpu_supports("avx2") == 0) return 0;
  return static_cast<double>(x.size_bytes()) /
         fastest(10, [&] { read_all(x.data(), std::ssize(x)); });
}

/// Runs the benchmark; CPU seconds per iteration.
template <class Body>
double time_iterations(benchmark::State& state, Body body) {
  const double start = thread_cpu_seconds();
  for (auto _ : state) body();
  return (thread_cpu_seconds() - start) / static_cast<double>(state.iterations());
}

void report_flops(benchmark::State& state, double flops, double seconds) {
  state.counters["FLOP/s"] = flops / seconds;
  if (peak_flops() > 0) state.counters["of_peak"] = flops / seconds / peak_flops();
}

Buffer<float> random_buffer(int64_t count) {
  Buffer<float> buffer(count);
  std::minstd_rand random(1);
  std::uniform_real_distribution<float> uniform(-2, 2);
  for (float& x : buffer.span()) x = uniform(random);
  return buffer;
}

void fma_peak(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(peak_flops());
  state.counters["FLOP/s"] = peak_flops();
}
BENCHMARK(fma_peak)->Iterations(1);

/// Causal self-attention of documents of equal length; FLOPs of visible pairs only.
void attention_forward(benchmark::State& state) {
  const int64_t tokens = state.range(0), document = state.range(1);
  HeadShape shape{state.range(2), state.range(3), state.range(4), 0};
  shape.scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
  const int64_t width = shape.heads * shape.head_dim, kv_width = shape.kv_heads * shape.head_dim;
  const Buffer<float> q = random_buffer(tokens * width), k = random_buffer(tokens * kv_width),
                      v = random_buffer(tokens * kv_width);
  Buffer<float> out(tokens * width), lse(tokens * shape.heads);
  AttentionState result{out.matrix(tokens, width), lse.matrix(tokens, shape.heads)};
  std::vector<Rectangle> rectangles;
  int64_t pairs = 0;
  for (int64_t at = 0; at < tokens; at += document) {
    const int64_t length = std::min(document, tokens - at);
    rectangles.push_back({LocalToken(at), length, LocalToken(at), length, {true, 0}});
    pairs += rectangles.back().pairs();
  }
  const auto kernel = make_cpu_kernel();
  const double seconds = time_iterations(state, [&] {
    kernel->reset(result);
    kernel->forward(shape, q.matrix(tokens, width),
                    {k.matrix(tokens, kv_width), v.matrix(tokens, kv_width)}, rectangles, result,
                    {});
  });
  report_flops(state, forward_flops(pairs, shape.heads, shape.head_dim), seconds);
}
BENCHMARK(attention_forward)
    ->ArgNames({"tokens", "document", "heads", "kv_heads", "dim"})
    ->Args({4096, 4096, 8, 4, 32})
    ->Args({4096, 4096, 1, 1, 64})
    ->Args({4096, 4096, 1, 1, 128})
    ->Args({4096, 256, 8, 4, 32})
    ->Args({4096, 64, 8, 4, 32})
    ->Args({4096, 8, 8, 4, 32})
    ->Unit(benchmark::kMillisecond);

void gemm_f32(benchmark::State& state) {
  const int64_t m = state.range(0), n = state.range(1), k = state.range(2);
  const Buffer<float> a = random_buffer(m * k), b = random_buffer(k * n);
  Buffer<float> c(m * n);
  const double seconds =
      time_iterations(state, [&] { gemm(a.matrix(m, k), b.matrix(k, n), c.matrix(m, n)); });
  report_flops(state, 2.0 * static_cast<double>(m * n * k), seconds);
}
BENCHMARK(gemm_f32)
    ->ArgNames({"m", "n", "k"})
    ->Args({4096, 192, 512})
    ->Args({4096, 512, 192})
    ->Args({4096, 192, 256})
    ->Args({16, 512, 192})
    ->Unit(benchmark::kMillisecond);

void row_statistics_f32(benchmark::State& state) {
  const int64_t rows = state.range(0), columns = state.range(1);
  const Buffer<float> logits = random_buffer(rows * columns);
  const std::vector<int32_t> targets(static_cast<size_t>(rows), 3);
  std::vector<RowStatistics> out(static_cast<size_t>(rows));
  const double limit = read_rate(logits.span());
  const double seconds = time_iterations(
      state, [&] { row_statistics(logits.matrix(rows, columns), 0, columns, targets, out); });
  const double rate = static_cast<double>(logits.span().size_bytes()) / seconds;
  state.counters["B/s"] = rate;
  if (limit > 0) state.counters["of_read"] = rate / limit;
}
BENCHMARK(row_statistics_f32)
    ->ArgNames({"rows", "columns"})
    ->Args({4096, 264})
    ->Args({2048, 32768})
    ->Args({512, 151936})
    ->Unit(benchmark::kMillisecond);

/// Bytes read and written by the operation, once each.
void elementwise(benchmark::State& state, int64_t arrays,
                 const std::function<void(MatrixView<float>, MatrixView<float>)>& operation) {
  const int64_t rows = state.range(0), columns = state.range(1);
  Buffer<float> x = random_buffer(rows * columns), y = random_buffer(rows * columns);
  const double seconds =
      time_iterations(state, [&] { operation(x.matrix(rows, columns), y.matrix(rows, columns)); });
  const double bytes = static_cast<double>(arrays * rows * columns) * sizeof(float);
  state.counters["B/s"] = bytes / seconds;
}

void rms_norm_f32(benchmark::State& state) {
  const std::vector<float> weight(static_cast<size_t>(state.range(1)), 1.0F);
  elementwise(state, 2, [&](auto x, auto y) { rms_norm(x, weight, 1e-5F, y); });
}
void rope_f32(benchmark::State& state) {
  std::vector<int32_t> positions(static_cast<size_t>(state.range(0)));
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i);
  elementwise(state, 2, [&](auto x, auto) { apply_rope(x, 32, 10000, positions); });
}
void silu_multiply_f32(benchmark::State& state) {
  Buffer<float> out(state.range(0) * state.range(1));
  const auto to = out.matrix(state.range(0), state.range(1));
  elementwise(state, 3, [&](auto x, auto y) { silu_multiply(x, y, to); });
}
void add_in_place_f32(benchmark::State& state) {
  elementwise(state, 3, [](auto x, auto y) { add_in_place(x, y); });
}
BENCHMARK(rms_norm_f32)->Args({4096, 192})->Unit(benchmark::kMicrosecond);
BENCHMARK(rope_f32)->Args({4096, 256})->Unit(benchmark::kMicrosecond);
BENCHMARK(silu_multiply_f32)->Args({4096, 512})->Unit(benchmark::kMicrosecond);
BENCHMARK(add_in_place_f32)->Args({4096, 192})->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace gyre
