#include "runtime/peak.hpp"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/error.hpp"
#include "runtime/clock.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

/// Time of the fastest repetition, in seconds: CPU time for one thread, wall-clock time for more.
template <class Body>
double fastest(int repetitions, Body body, int threads = 1) {
  double best = HUGE_VAL;
  for (int i = 0; i < repetitions; ++i) {
    const Stopwatch watch;
    const double start = thread_cpu_seconds();
    body();
    best = std::min(best, threads == 1 ? thread_cpu_seconds() - start : watch.seconds());
  }
  return best;
}

/// Calls body(begin, count) for slices of an array; all but the last are multiples of 32 elements.
template <class Body>
void in_slices(int threads, int64_t count, Body body) {
  constexpr int64_t slice = 1 << 18;
  for_each_task(threads, (count + slice - 1) / slice, [&](int64_t task, int) {
    body(task * slice, std::min(slice, count - task * slice));
  });
}

// Twelve separate accumulators hide the FMA latency; g++ 12 would keep an array in memory.
#define GYRE_TWELVE_FMAS(fma)                                                     \
  r0 = fma(r0, a, b), r1 = fma(r1, a, b), r2 = fma(r2, a, b), r3 = fma(r3, a, b), \
  r4 = fma(r4, a, b), r5 = fma(r5, a, b), r6 = fma(r6, a, b), r7 = fma(r7, a, b), \
  r8 = fma(r8, a, b), r9 = fma(r9, a, b), r10 = fma(r10, a, b), r11 = fma(r11, a, b)
constexpr int64_t fma_loops = 100'000;  // a repetition takes about 0.3 ms
constexpr int fma_repetitions = 40;

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
  asm volatile("" : : "x"(sum));
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
  asm volatile("" : : "x"(sum));
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
  asm volatile("" : : "x"(a));
}

__attribute__((target("avx2"))) void negate_all(float* x, int64_t count) {
  const __m256 sign = _mm256_set1_ps(-0.0F);
  for (int64_t i = 0; i + 16 <= count; i += 16) {
    _mm256_storeu_ps(x + i, _mm256_xor_ps(sign, _mm256_loadu_ps(x + i)));
    _mm256_storeu_ps(x + i + 8, _mm256_xor_ps(sign, _mm256_loadu_ps(x + i + 8)));
  }
}

__attribute__((target("avx2"))) void copy_all(const float* x, int64_t count, float* to) {
  for (int64_t i = 0; i + 16 <= count; i += 16) {
    _mm256_stream_ps(to + i, _mm256_loadu_ps(x + i));
    _mm256_stream_ps(to + i + 8, _mm256_loadu_ps(x + i + 8));
  }
  _mm_sfence();
}

/// The widest FMA loop of this processor and its FLOPs; null if there is none.
struct FmaLoop {
  void (*run)() = nullptr;
  double flops = 0;
};

FmaLoop fma_loop() {
  const bool wide = __builtin_cpu_supports("avx512f") != 0;
  if (!wide && !(__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0))
    return {};
  return {wide ? fma_loop_avx512 : fma_loop_avx2,
          12.0 * 2.0 * (wide ? 16.0 : 8.0) * static_cast<double>(fma_loops)};
}

double do_fmas(int threads) {
  constexpr int repetitions = 10;
  const FmaLoop loop = fma_loop();
  if (loop.run == nullptr) return 0;
  for_each_task(threads, threads, [&](int64_t, int) {
    for (int i = 0; i < repetitions; ++i) loop.run();
  });
  return loop.flops * repetitions * threads;
}

}  // namespace

double measured_fma_peak() {
  static const double peak = [] {
    const FmaLoop loop = fma_loop();
    return loop.run == nullptr ? 0.0 : loop.flops / fastest(fma_repetitions, loop.run);
  }();
  return peak;
}

double measured_read_rate(std::span<const float> array, int threads) {
  if (__builtin_cpu_supports("avx2") == 0) return 0;
  const auto slice = [&](int64_t begin, int64_t count) { read_all(array.data() + begin, count); };
  const auto pass = [&] { in_slices(threads, std::ssize(array), slice); };
  return static_cast<double>(array.size_bytes()) / fastest(10, pass, threads);
}

double measured_update_rate(std::span<float> array, int threads) {
  if (__builtin_cpu_supports("avx2") == 0) return 0;
  const auto slice = [&](int64_t begin, int64_t count) { negate_all(array.data() + begin, count); };
  const auto pass = [&] { in_slices(threads, std::ssize(array), slice); };
  return 2 * static_cast<double>(array.size_bytes()) / fastest(10, pass, threads);
}

double measured_copy_rate(std::span<const float> from, std::span<float> to, int threads) {
  GYRE_CHECK(from.size() == to.size(), "{} elements to {}", from.size(), to.size());
  if (__builtin_cpu_supports("avx2") == 0) return 0;
  const auto slice = [&](int64_t begin, int64_t count) {
    copy_all(from.data() + begin, count, to.data() + begin);
  };
  const auto pass = [&] { in_slices(threads, std::ssize(from), slice); };
  return 2 * static_cast<double>(from.size_bytes()) / fastest(10, pass, threads);
}

double do_core_work(CoreWork work, std::span<float> array, int threads) {
  if (work == CoreWork::fma) return do_fmas(threads);
  if (__builtin_cpu_supports("avx2") == 0) return 0;
  const auto bytes = static_cast<double>(array.size_bytes());
  const int64_t count = std::ssize(array);
  float* const data = array.data();
  switch (work) {
    case CoreWork::fma:
      break;
    case CoreWork::read:
      in_slices(threads, count, [&](int64_t begin, int64_t n) { read_all(data + begin, n); });
      return bytes;
    case CoreWork::update:
      in_slices(threads, count, [&](int64_t begin, int64_t n) { negate_all(data + begin, n); });
      return 2 * bytes;
    case CoreWork::copy:
      in_slices(threads, count / 2, [&](int64_t begin, int64_t n) {
        copy_all(data + begin, n, data + count / 2 + begin);
      });
      return bytes;
  }
  return 0;
}

}  // namespace gyre
