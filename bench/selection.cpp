// The M largest logits per row, and rounds of the radix search, against the rate at which the same
// array can be read.
//
// Limit for one core: a pass reads 2 or 4 bytes per element from memory, at measured_read_rate.
// Instructions come second: a pass for the largest alone is a load and a comparison per 16
// elements; partials add an exponential, about 16 instructions. So f32 should reach the read rate,
// and bf16, whose elements arrive twice as fast, somewhat less with partials. Candidates above the
// threshold cost M · ln(columns / run) appends per row and a few rounds of pruning: 2 to 5 µs per
// row, as long as reading 32 K columns of bf16 at 20 GB/s; for 152 K that is little.
//
// A round of the radix search adds probabilities one by one to 256 sums, without vectors: 1 ns per
// element in the first round. Later rounds skip vectors without a column in range.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/token_random.hpp"
#include "logprobs/rows/row_digits.hpp"
#include "logprobs/rows/row_selection.hpp"
#include "runtime/buffer.hpp"
#include "runtime/clock.hpp"
#include "runtime/peak.hpp"

namespace gyre {
namespace {

constexpr int64_t bytes = int64_t{96} << 20;  // larger than the caches

/// As many rows of one type and standard deviation as fit `bytes`.
class Logits {
 public:
  Logits(int64_t columns, DType type, double size)
      : type_(type),
        rows_(bytes / (columns * size_of(type))),
        columns_(columns),
        memory_(bytes / 4) {
    std::vector<float> row(columns);
    for (int64_t r = 0; r < rows_; ++r) {
      fill_token_row({1, TokenTensor::logits}, r, row);
      for (int64_t c = 0; c < columns; ++c) {
        const float z = row[c] * static_cast<float>(size);
        if (type == DType::f32)
          ref().as<float>()(r, c) = z;
        else
          ref().as<bf16>()(r, c) = to_bf16(z);
      }
    }
  }
  MatrixRef ref() {
    return {reinterpret_cast<std::byte*>(memory_.data()), type_, rows_, columns_, columns_};
  }
  int64_t rows() const { return rows_; }
  double read_bytes() const { return rows_ * columns_ * size_of(type_); }
  std::span<const float> array() const { return memory_.span(); }

 private:
  DType type_;
  int64_t rows_, columns_;
  Buffer<float> memory_;
};

Logits logits_of(const benchmark::State& state) {
  return {state.range(0), state.range(1) != 0 ? DType::bf16 : DType::f32,
          static_cast<double>(state.range(2))};
}

/// Runs the benchmark; reports the read rate per CPU time, and its fraction of the limit.
template <class Body>
void measure(benchmark::State& state, const Logits& logits, Body body) {
  const double limit = measured_read_rate(logits.array());
  double best = HUGE_VAL;
  for (auto _ : state) {
    const double start = thread_cpu_seconds();
    body();
    best = std::min(best, thread_cpu_seconds() - start);
  }
  const double rate = logits.read_bytes() / best;
  state.counters["B/s"] = rate;
  state.counters["s/row"] = best / logits.rows();
  state.counters["of_limit"] = limit > 0 ? rate / limit : NAN;
}

void row_top_64(benchmark::State& state) {
  constexpr int64_t length = 64;
  Logits logits = logits_of(state);
  const size_t rows = logits.rows();
  std::vector<float> values(rows * length);
  std::vector<int32_t> ids(values.size()), last(rows);
  std::vector<SoftmaxPartial> partials(state.range(3) != 0 ? rows : 0);
  measure(state, logits, [&] {
    row_top(logits.ref(), {state.range(0)}, {values, ids, last, length}, partials);
  });
}
void partials_alone(benchmark::State& state) {
  Logits logits = logits_of(state);
  std::vector<SoftmaxPartial> partials(logits.rows());
  measure(state, logits, [&] { softmax_partials(logits.ref(), {state.range(0)}, partials); });
}

/// First or second round of a search over key digits: 24 bits for f32, 8 for bf16.
void digit_round(benchmark::State& state) {
  Logits logits = logits_of(state);
  const bool first = state.range(3) == 0;
  const DType type = logits.ref().type;
  const float max = 4 * static_cast<float>(state.range(2));
  MassScan scan{max, 1, fraction_bits_for(state.range(0)), key_of(max / 4, type), 0, first};
  if (type == DType::f32) scan.shift = first ? 16 : 8;
  std::vector<int64_t> masses(digit_sums);
  measure(state, logits, [&] {
    for (int64_t r = 0; r < logits.rows(); ++r)
      add_masses(logits.ref(), r, state.range(0), scan, masses.data());
  });
}

void cases(benchmark::internal::Benchmark* all, const char* last,
           const std::vector<int64_t>& choices) {
  all->ArgNames({"columns", "bf16", "size", last})->Unit(benchmark::kMillisecond);
  for (const int64_t columns : {32768, 151936})
    for (const int64_t narrow : {0, 1})
      for (const int64_t size : {1, 4})
        for (const int64_t choice : choices) all->Args({columns, narrow, size, choice});
}
BENCHMARK(row_top_64)->Apply([](auto* b) { cases(b, "partials", {0, 1}); });
BENCHMARK(partials_alone)->Apply([](auto* b) { cases(b, "partials", {1}); });
BENCHMARK(digit_round)->Apply([](auto* b) { cases(b, "round", {0, 1}); });

}  // namespace
}  // namespace gyre
