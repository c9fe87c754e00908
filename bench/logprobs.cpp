// Log-probability kernels against the limits of the machine, which the same program measures next
// to each result, with the same memory and number of threads:
//
//     softmax_partials       the rate at which the logits' memory can be read
//     gradients in place     the rate of an update loop in that memory
//     other gradients        the rate of a copy with non-temporal stores
//
// `of_limit` is the fraction of that limit; NaN where no limit was measured. Bytes are those that
// the operation must move: each element read once and written once. Rates are per second of CPU
// time on one thread, which other load disturbs less, and of wall-clock time on several. Results
// are medians of five repetitions.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "logprobs/rows/row_gradient.hpp"
#include "logprobs/rows/row_statistics.hpp"
#include "runtime/buffer.hpp"
#include "runtime/peak.hpp"
#include "timing.hpp"

namespace gyre {
namespace {

constexpr int64_t array_bytes = 256 << 20;  // eight times the last-level cache

/// array_bytes of memory, used as f32 for the limits and as rows of logits.
class Logits {
 public:
  Logits(int64_t columns, bool narrow, uint64_t seed = 1)
      : memory_(array_bytes / sizeof(float)),
        type_(narrow ? DType::bf16 : DType::f32),
        columns_(columns),
        rows_(array_bytes / size_of(type_) / columns) {
    std::minstd_rand random(static_cast<unsigned>(seed));
    std::normal_distribution<float> normal(0, 2);
    std::vector<float> pool(1 << 18);
    for (float& z : pool) z = normal(random);
    const auto of_pool = [&](int64_t i) { return pool[(i * 7 + i / 262139) & (pool.size() - 1)]; };
    if (narrow)
      for (int64_t i = 0; i < 2 * memory_.size(); ++i) halves()[i] = to_bf16(of_pool(i));
    else
      for (int64_t i = 0; i < memory_.size(); ++i) memory_[i] = of_pool(i);
  }
  MatrixRef ref() {
    return {reinterpret_cast<std::byte*>(memory_.data()), type_, rows_, columns_, columns_};
  }
  std::span<float> memory() { return memory_.span(); }
  int64_t rows() const { return rows_; }
  double bytes() const { return rows_ * columns_ * size_of(type_); }

 private:
  bf16* halves() { return reinterpret_cast<bf16*>(memory_.data()); }
  Buffer<float> memory_;
  DType type_;
  int64_t columns_, rows_;
};

/// Sets the same counters for all benchmarks, so that they fit one table. `limit` is in bytes/s.
void report(benchmark::State& state, double bytes, double seconds, int64_t rows, double limit) {
  state.counters["B/s"] = bytes / seconds;
  state.counters["s/row"] = seconds / rows;
  state.counters["of_limit"] =
      limit > 0 ? bytes / seconds / limit : std::numeric_limits<double>::quiet_NaN();
}

struct Arguments {
  int64_t columns;
  bool narrow;
  int threads;
  explicit Arguments(const benchmark::State& state)
      : columns(state.range(0)),
        narrow(state.range(1) != 0),
        threads(static_cast<int>(state.range(2))) {}
};

void sizes(benchmark::internal::Benchmark* cases) {
  cases->ArgNames({"columns", "bf16", "threads"})
      ->ArgsProduct({{32768, 151936}, {0, 1}, {1, 2}})
      ->Unit(benchmark::kMillisecond)
      ->Repetitions(5)
      ->ReportAggregatesOnly();
}

void statistics(benchmark::State& state, bool weighted) {
  const Arguments a(state);
  Logits logits(a.columns, a.narrow);
  std::vector<SoftmaxPartial> out(logits.rows());
  const double limit = measured_read_rate(logits.memory(), a.threads);
  const double seconds = time_iterations(state, a.threads, [&] {
    softmax_partials(logits.ref(), {a.columns, 1, weighted, a.threads}, out);
  });
  report(state, logits.bytes(), seconds, logits.rows(), limit);
}
BENCHMARK_CAPTURE(statistics, partials, false)->Apply(sizes);
BENCHMARK_CAPTURE(statistics, partials_for_entropy, true)->Apply(sizes);

void cross_statistics(benchmark::State& state) {
  const Arguments a(state);
  Logits student(a.columns, a.narrow), teacher(a.columns, a.narrow, 2);
  std::vector<CrossPartial> out(student.rows());
  const double limit = measured_read_rate(student.memory(), a.threads);
  const double seconds = time_iterations(state, a.threads, [&] {
    softmax_cross_partials(student.ref(), teacher.ref(), a.columns, a.threads, out);
  });
  report(state, 2 * student.bytes(), seconds, student.rows(), limit);
}
BENCHMARK(cross_statistics)->Apply(sizes);

/// Inputs with one target per row: log-probabilities alone or with entropies.
struct Gradients {
  std::vector<RowNormalizer> normalizers;
  std::vector<GradientCoefficients> coefficients;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  Gradients(int64_t rows, bool entropy)
      : normalizers(rows, {9.0F, 3.4F}),
        coefficients(rows, {-1.0F, entropy ? -0.01F : 0.0F}),
        ids(rows, 3),
        weights(rows, 1.0F) {}
  RowTokenIds token_ids() const { return {ids, weights, 1, 0}; }
};

void gradient_in_place(benchmark::State& state, bool entropy) {
  const Arguments a(state);
  Logits logits(a.columns, a.narrow);
  const Gradients g(logits.rows(), entropy);
  const double limit = measured_update_rate(logits.memory(), a.threads);
  const double seconds = time_iterations(state, a.threads, [&] {
    row_gradient(logits.ref(), {a.columns, 1, a.threads}, g.normalizers, g.coefficients,
                 g.token_ids(), logits.ref());
  });
  report(state, 2 * logits.bytes(), seconds, logits.rows(), limit);
}
BENCHMARK_CAPTURE(gradient_in_place, logprob, false)->Apply(sizes);
BENCHMARK_CAPTURE(gradient_in_place, with_entropy, true)->Apply(sizes);

void gradient_out_of_place(benchmark::State& state, bool entropy) {
  const Arguments a(state);
  Logits logits(a.columns, a.narrow), out(a.columns, a.narrow);
  const Gradients g(logits.rows(), entropy);
  const double limit = measured_copy_rate(logits.memory(), out.memory(), a.threads);
  const double seconds = time_iterations(state, a.threads, [&] {
    row_gradient(logits.ref(), {a.columns, 1, a.threads}, g.normalizers, g.coefficients,
                 g.token_ids(), out.ref());
  });
  report(state, 2 * logits.bytes(), seconds, logits.rows(), limit);
}
BENCHMARK_CAPTURE(gradient_out_of_place, logprob, false)->Apply(sizes);
BENCHMARK_CAPTURE(gradient_out_of_place, with_entropy, true)->Apply(sizes);

void softmax(benchmark::State& state, bool exponentiate) {
  const Arguments a(state);
  Logits logits(a.columns, a.narrow), out(a.columns, a.narrow);
  const Gradients g(logits.rows(), false);
  const double limit = measured_copy_rate(logits.memory(), out.memory(), a.threads);
  const double seconds = time_iterations(state, a.threads, [&] {
    row_log_softmax(logits.ref(), {a.columns, 1, a.threads}, g.normalizers, exponentiate,
                    out.ref());
  });
  report(state, 2 * logits.bytes(), seconds, logits.rows(), limit);
}
BENCHMARK_CAPTURE(softmax, probabilities, true)->Apply(sizes);
BENCHMARK_CAPTURE(softmax, logarithms, false)->Apply(sizes);

/// Log-probability and entropy of one target per row, forward and backward in place, kernels alone.
/// Each element is read twice and written once, 12 or 6 bytes; all else is independent of the
/// columns. The limit is the time of these passes at the measured rates.
void forward_and_backward(benchmark::State& state) {
  const Arguments a(state);
  Logits logits(a.columns, a.narrow);
  const Gradients g(logits.rows(), true);
  std::vector<SoftmaxPartial> out(logits.rows());
  const double read = measured_read_rate(logits.memory(), a.threads);
  const double update = measured_update_rate(logits.memory(), a.threads);
  const double seconds = time_iterations(state, a.threads, [&] {
    softmax_partials(logits.ref(), {a.columns, 1, true, a.threads}, out);
    row_gradient(logits.ref(), {a.columns, 1, a.threads}, g.normalizers, g.coefficients,
                 g.token_ids(), logits.ref());
  });
  const double bytes = 3 * logits.bytes();
  const double least = logits.bytes() / read + 2 * logits.bytes() / update;
  report(state, bytes, seconds, logits.rows(), read > 0 && update > 0 ? bytes / least : 0);
}
BENCHMARK(forward_and_backward)->Apply(sizes);

/// Rows of a small vocabulary, in cache: measures the cost per row.
void short_rows(benchmark::State& state) {
  const int64_t rows = 4096, columns = state.range(0);
  Buffer<float> memory(rows * columns);
  std::minstd_rand random(1);
  std::normal_distribution<float> normal;
  for (float& z : memory.span()) z = normal(random);
  std::vector<SoftmaxPartial> out(rows);
  const double seconds = time_iterations(state, 1, [&] {
    softmax_partials(std::as_const(memory).matrix(rows, columns), {columns, 1, false, 1}, out);
  });
  report(state, memory.size() * sizeof(float), seconds, rows, 0);
}
BENCHMARK(short_rows)->ArgName("columns")->Arg(64)->Arg(264)->Arg(1024);

}  // namespace
}  // namespace gyre
