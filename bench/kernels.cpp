// CPU kernels against the limit of the core that they run on: the FMA rate of a register-only loop,
// measured before each repetition. Log-probabilities are in logprobs.cpp.
//
// Rates are per second of CPU time. A shared machine can be slower by half for seconds: "best" is
// the largest of nine repetitions, which meet quiet times if they are interleaved
// (--benchmark_enable_random_interleaving=true), and the limit is the largest so far.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "attention/kernels/block_kernel.hpp"
#include "model/elementwise.hpp"
#include "runtime/buffer.hpp"
#include "runtime/clock.hpp"
#include "runtime/gemm.hpp"
#include "runtime/peak.hpp"
#include "runtime/row_copy.hpp"
#include "timing.hpp"

namespace gyre {
namespace {

/// Largest FLOP/s so far of multiply-adds on registers; 0 where there is no such loop.
double fma_rate() {
  static double best = measured_fma_peak();
  for (int i = 0; i < 3; ++i) {
    const double start = thread_cpu_seconds();
    const double flops = do_core_work(CoreWork::fma, {}, 1);
    best = std::max(best, flops / (thread_cpu_seconds() - start));
  }
  return best;
}

/// Times `body` of `flops`, next to the FMA rate of as many cores as it has threads.
template <class Body>
void time_flops(benchmark::State& state, double flops, int64_t threads, Body body) {
  const double peak = threads * fma_rate();
  const double rate = flops / time_iterations(state, threads, body);
  state.counters["FLOP/s"] = rate;
  if (peak > 0) state.counters["of_peak"] = rate / peak;
}

Buffer<float> random_buffer(int64_t count) {
  Buffer<float> buffer(count);
  std::minstd_rand random(1);
  std::uniform_real_distribution<float> uniform(-2, 2);
  for (float& x : buffer.span()) x = uniform(random);
  return buffer;
}

/// "best" is the largest value: the best of rates, but the longest of times.
void repeated(benchmark::internal::Benchmark* cases) {
  cases->Repetitions(9)->ReportAggregatesOnly()->ComputeStatistics(
      "best",
      [](const std::vector<double>& all) { return *std::max_element(all.begin(), all.end()); });
}

void fma_peak(benchmark::State& state) {
  double rate = 0;
  for (auto _ : state) rate = fma_rate();
  state.counters["FLOP/s"] = rate;
}
BENCHMARK(fma_peak)->Iterations(1)->Apply(repeated);

/// Causal self-attention of documents of equal length. Keys and values are interleaved by token,
/// [tokens, 2, kv_heads * dim], as they are sent.
class AttentionProblem {
 public:
  struct Shape {
    int64_t tokens, document, heads, kv_heads, dim, window;
    bool bf16_inputs;
    int threads;
  };

  explicit AttentionProblem(const Shape& s)
      : shape_(s),
        q_(random_buffer(s.tokens * width())),
        kv_(random_buffer(2 * s.tokens * kv_width())),
        d_out_(random_buffer(s.tokens * width())),
        out_(s.tokens * width()),
        lse_(s.tokens * s.heads),
        delta_(s.tokens * s.heads),
        d_q_(s.tokens * width()),
        d_kv_(2 * s.tokens * kv_width()),
        q16_(narrow(q_)),
        kv16_(narrow(kv_)),
        d_out16_(narrow(d_out_)) {
    for (int64_t at = 0; at < s.tokens; at += s.document) {
      const int64_t length = std::min(s.document, s.tokens - at);
      rectangles_.push_back({at, length, at, length, {true, 0, 1, 1, s.window}});
    }
    for (Buffer<float>* buffer : {&delta_, &d_q_, &d_kv_})
      std::fill_n(buffer->data(), buffer->size(), 0.0F);
  }

  int64_t visible() const { return total_pairs(rectangles_) * shape_.heads * shape_.dim; }

  void forward() {
    ForwardBlock block;
    fill(block);
    block.overwrite = true;
    block.out = out_.matrix(shape_.tokens, width());
    block.lse = lse_.matrix(shape_.tokens, shape_.heads);
    kernel_->forward(block);
  }
  void backward() {
    BackwardBlock block;
    fill(block);
    block.d_out = shape_.bf16_inputs
                      ? ConstMatrixRef(std::as_const(d_out16_).matrix(shape_.tokens, width()))
                      : ConstMatrixRef(std::as_const(d_out_).matrix(shape_.tokens, width()));
    block.lse = lse_.matrix(shape_.tokens, shape_.heads);
    block.delta = delta_.matrix(shape_.tokens, shape_.heads);
    block.d_q = d_q_.matrix(shape_.tokens, width());
    const MatrixView<float> d_kv = d_kv_.matrix(shape_.tokens, 2 * kv_width());
    block.d_k = d_kv.columns_from(0, kv_width());
    block.d_v = d_kv.columns_from(kv_width(), kv_width());
    kernel_->backward(block);
  }

 private:
  int64_t width() const { return shape_.heads * shape_.dim; }
  int64_t kv_width() const { return shape_.kv_heads * shape_.dim; }
  static Buffer<bf16> narrow(const Buffer<float>& from) {
    Buffer<bf16> to(from.size());
    std::transform(from.span().begin(), from.span().end(), to.data(), to_bf16);
    return to;
  }
  void fill(BlockInput& in) const {
    in.heads = {shape_.heads,
                shape_.kv_heads,
                shape_.dim,
                shape_.heads / shape_.kv_heads,
                0,
                1 / std::sqrt(static_cast<float>(shape_.dim))};
    const auto set = [&](const auto& q, const auto& kv) {
      in.q = ConstMatrixRef(q.matrix(shape_.tokens, width()));
      const auto both = kv.matrix(shape_.tokens, 2 * kv_width());
      in.k = ConstMatrixRef(both.columns_from(0, kv_width()));
      in.v = ConstMatrixRef(both.columns_from(kv_width(), kv_width()));
    };
    if (shape_.bf16_inputs)
      set(q16_, kv16_);
    else
      set(q_, kv_);
    in.rectangles = rectangles_;
  }

  Shape shape_;
  Buffer<float> q_, kv_, d_out_, out_, lse_, delta_, d_q_, d_kv_;
  Buffer<bf16> q16_, kv16_, d_out16_;
  std::vector<Rectangle> rectangles_;
  std::unique_ptr<BlockKernel> kernel_ = make_cpu_kernel(shape_.threads);
};

AttentionProblem::Shape attention_shape(const benchmark::State& state) {
  return {state.range(0), state.range(1), state.range(2),      state.range(3),
          state.range(4), state.range(5), state.range(6) != 0, static_cast<int>(state.range(7))};
}
/// Counts FLOPs of visible pairs only: two products of `dim` multiply-adds per pair.
void attention_forward(benchmark::State& state) {
  AttentionProblem problem(attention_shape(state));
  time_flops(state, 4.0 * problem.visible(), state.range(7), [&] { problem.forward(); });
}
/// Five products per pair.
void attention_backward(benchmark::State& state) {
  AttentionProblem problem(attention_shape(state));
  problem.forward();
  time_flops(state, 10.0 * problem.visible(), state.range(7), [&] { problem.backward(); });
}
void attention_cases(benchmark::internal::Benchmark* cases) {
  cases->ArgNames({"tokens", "document", "heads", "kv_heads", "dim", "window", "bf16", "threads"})
      ->Args({4096, 4096, 1, 1, 64, 0, 0, 1})
      ->Args({4096, 4096, 1, 1, 80, 0, 0, 1})
      ->Args({4096, 4096, 1, 1, 128, 0, 0, 1})
      ->Args({4096, 4096, 1, 1, 256, 0, 0, 1})
      ->Args({4096, 4096, 1, 1, 128, 0, 1, 1})
      ->Args({4096, 4096, 8, 8, 64, 0, 0, 1})
      ->Args({4096, 4096, 8, 8, 128, 0, 0, 1})
      ->Args({4096, 4096, 8, 8, 64, 0, 0, 2})
      ->Args({4096, 4096, 8, 8, 128, 0, 0, 2})
      ->Args({4096, 4096, 8, 4, 64, 0, 0, 1})
      ->Args({4096, 4096, 8, 2, 128, 0, 0, 1})
      ->Args({4096, 4096, 8, 4, 64, 512, 0, 1})
      ->Args({4096, 4096, 8, 4, 32, 0, 0, 1})
      ->Args({4096, 256, 8, 2, 128, 0, 1, 1});
  for (const int64_t document : {256, 64, 8})
    for (const auto& [kv_heads, dim] : {std::pair{4, 32}, {4, 64}, {8, 64}, {2, 128}, {8, 128}})
      cases->Args({4096, document, 8, kv_heads, dim, 0, 0, 1});
  for (const int64_t document : {1024, 256, 64, 8})
    for (const int64_t dim : {64, 128}) cases->Args({1024, document, 1, 1, dim, 0, 0, 1});
  cases->Unit(benchmark::kMillisecond)->Apply(repeated);
}
BENCHMARK(attention_forward)->Apply(attention_cases);
BENCHMARK(attention_backward)->Apply(attention_cases);

void gemm_f32(benchmark::State& state) {
  const int64_t m = state.range(0), n = state.range(1), k = state.range(2);
  const Buffer<float> a = random_buffer(m * k), b = random_buffer(k * n);
  Buffer<float> c(m * n);
  time_flops(state, 2.0 * (m * n * k), 1,
             [&] { gemm(a.matrix(m, k), b.matrix(k, n), c.matrix(m, n)); });
}
BENCHMARK(gemm_f32)
    ->ArgNames({"m", "n", "k"})
    ->Args({4096, 192, 512})
    ->Args({4096, 512, 192})
    ->Args({4096, 192, 256})
    ->Args({16, 512, 192})
    ->Args({4588, 1536, 576})  // the MLP of a model of 135M parameters
    ->Args({4588, 576, 1536})
    ->Args({4588, 576, 576})
    ->Args({2048, 8192, 2048})  // of 1B
    ->Unit(benchmark::kMillisecond)
    ->Apply(repeated);

/// Counts each byte that the operation reads or writes once.
void elementwise(benchmark::State& state, int64_t arrays,
                 const std::function<void(MatrixView<float>, MatrixView<float>)>& operation) {
  const int64_t rows = state.range(0), columns = state.range(1);
  Buffer<float> x = random_buffer(rows * columns), y = random_buffer(rows * columns);
  const double seconds = time_iterations(
      state, 1, [&] { operation(x.matrix(rows, columns), y.matrix(rows, columns)); });
  const double bytes = arrays * rows * columns * sizeof(float);
  state.counters["B/s"] = bytes / seconds;
}

void rms_norm_f32(benchmark::State& state) {
  const std::vector<float> weight(state.range(1), 1.0F);
  elementwise(state, 2, [&](auto x, auto y) { rms_norm(x, weight, 1e-5F, y); });
}
void rope_f32(benchmark::State& state) {
  std::vector<int32_t> positions(state.range(0));
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i);
  const Rotary rotary = plain_rotary(32, 10000);
  elementwise(state, 2, [&](auto x, auto) { apply_rope(x, 32, rotary, positions); });
}
void silu_multiply_f32(benchmark::State& state) {
  Buffer<float> out(state.range(0) * state.range(1));
  const auto to = out.matrix(state.range(0), state.range(1));
  elementwise(state, 3, [&](auto x, auto y) { gate_multiply(GateActivation::silu, x, y, to); });
}
void add_in_place_f32(benchmark::State& state) {
  HostStream stream;
  elementwise(state, 3, [&](auto x, auto y) { copy_matrix(y, x, stream, true); });
}
BENCHMARK(rms_norm_f32)->Apply(repeated)->Args({4096, 192})->Unit(benchmark::kMicrosecond);
BENCHMARK(rope_f32)->Apply(repeated)->Args({4096, 256})->Unit(benchmark::kMicrosecond);
BENCHMARK(silu_multiply_f32)->Apply(repeated)->Args({4096, 512})->Unit(benchmark::kMicrosecond);
BENCHMARK(add_in_place_f32)->Apply(repeated)->Args({4096, 192})->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace gyre
