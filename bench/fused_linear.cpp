// The fused linear layer against the four matrix products that it cannot avoid (logits twice, dX
// and dW), which the same program measures in alternation, with the same shapes.
//
// gemms_ratio is the best time of a forward and a backward pass divided by the best time of the
// four products; extra_bytes is the layer's memory besides inputs and outputs; logits is the size
// of the logits that it does not store. Times are CPU time on one thread, which other load disturbs
// less, and wall-clock time on several.

#include "logprobs/fused_linear/fused_linear.hpp"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "runtime/buffer.hpp"
#include "runtime/clock.hpp"
#include "runtime/gemm.hpp"
#include "runtime/peak.hpp"

namespace gyre {
namespace {

/// A group of one rank, without MPI.
class OneRank final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  MemorySpace space() const override { return MemorySpace::host; }
  std::string_view backend() const override { return "none"; }
  std::unique_ptr<Communicator> split(int) override { return std::make_unique<OneRank>(); }

 protected:
  WorkPtr do_exchange(std::span<const SendSlice>, std::span<const RecvSlice>, Stream&,
                      std::string_view) override {
    return completed_work();
  }
  WorkPtr do_collective(const Collective& call, Stream&, std::string_view) override {
    if (!call.in_place()) std::ranges::copy(call.send, call.recv.begin());
    return completed_work();
  }
};

template <class T>
Buffer<T> random_buffer(int64_t count, float size) {
  Buffer<T> buffer(count);
  std::minstd_rand random(1);
  std::uniform_real_distribution<float> uniform(-size, size);
  for (T& x : buffer.span()) {
    if constexpr (std::is_same_v<T, bf16>)
      x = to_bf16(uniform(random));
    else
      x = uniform(random);
  }
  return buffer;
}

struct Shape {
  int64_t tokens, hidden, columns;
  int threads;
};

/// Shortest time so far.
class Best {
 public:
  explicit Best(int threads) : one_thread_(threads == 1) {}
  template <class Body>
  double time(Body body) {
    const Stopwatch watch;
    const double start = thread_cpu_seconds();
    body();
    const double seconds = one_thread_ ? thread_cpu_seconds() - start : watch.seconds();
    best_ = std::min(best_, seconds);
    return seconds;
  }
  double seconds() const { return best_; }

 private:
  bool one_thread_;
  double best_ = std::numeric_limits<double>::infinity();
};

/// The four products alone; the values do not matter.
class FourProducts {
 public:
  explicit FourProducts(const Shape& s)
      : shape_(s),
        x_(random_buffer<float>(s.tokens * s.hidden, 1)),
        weight_(random_buffer<float>(s.columns * s.hidden, 1)),
        logits_(random_buffer<float>(s.tokens * s.columns, 1)),
        out_(s.tokens * s.columns),
        d_x_(s.tokens * s.hidden),
        d_weight_(s.columns * s.hidden) {}

  void run() {
    const auto [n, d, v, threads] = shape_;
    for (int pass = 0; pass < 2; ++pass)
      gemm(x_.matrix(n, d), weight_.matrix(d, v), out_.matrix(n, v));
    gemm(logits_.matrix(n, v), weight_.matrix(v, d), d_x_.matrix(n, d));
    gemm(logits_.matrix(v, n), x_.matrix(n, d), d_weight_.matrix(v, d));
  }

 private:
  Shape shape_;
  const Buffer<float> x_, weight_, logits_;
  Buffer<float> out_, d_x_, d_weight_;
};

template <class T>
void fused_linear(benchmark::State& state) {
  const Shape s{state.range(0), state.range(1), state.range(2), static_cast<int>(state.range(3))};
  FourProducts products(s);
  OneRank alone;
  HostStream host;
  const Buffer<T> x = random_buffer<T>(s.tokens * s.hidden, 1),
                  weight = random_buffer<T>(s.columns * s.hidden, 0.1F);
  std::vector<int32_t> targets(static_cast<size_t>(s.tokens));
  for (size_t t = 0; t < targets.size(); ++t)
    targets[t] = static_cast<int32_t>(static_cast<int64_t>(t) * 7919 % s.columns);
  std::vector<float> logprob(targets.size()), ones(targets.size(), 1.0F);
  Buffer<float> d_x(s.tokens * s.hidden), d_weight(s.columns * s.hidden);
  LinearOptions options;
  options.tokens = s.tokens;
  options.hidden = s.hidden;
  options.threads = s.threads;
  options.tile_rows = state.range(4);
  options.tile_columns = state.range(5);
  reset_memory_peak();
  const int64_t before = memory_use().current_bytes;
  FusedLinear layer(options, balanced_partition(s.columns, 1), alone);
  Best forward(s.threads), backward(s.threads), bare(1);
  const auto x_view = x.matrix(s.tokens, s.hidden), w_view = weight.matrix(s.columns, s.hidden);
  for (auto _ : state) {
    double seconds =
        forward.time([&] { layer.forward(x_view, w_view, targets, host, logprob, {}); });
    seconds += backward.time([&] {
      layer.backward(
          x_view, w_view, targets,
          {ones, {}, d_x.matrix(s.tokens, s.hidden), d_weight.matrix(s.columns, s.hidden)}, host);
    });
    state.SetIterationTime(seconds);
    bare.time([&] { products.run(); });
  }
  const double fused = forward.seconds() + backward.seconds();
  const double flops = 8.0 * static_cast<double>(s.tokens * s.hidden * s.columns);
  const double gemms = bare.seconds() / s.threads;
  state.counters["gemms_ratio"] = fused / gemms;
  state.counters["forward_ratio"] = forward.seconds() / (gemms / 4);
  state.counters["backward_ratio"] = backward.seconds() / (gemms * 3 / 4);
  state.counters["FLOP/s"] = flops / fused;
  if (measured_fma_peak() > 0)
    state.counters["of_peak"] = flops / fused / measured_fma_peak() / s.threads;
  state.counters["extra_bytes"] = static_cast<double>(memory_use().peak_bytes - before);
  state.counters["logits"] = static_cast<double>(s.tokens * s.columns) * sizeof(float);
}

void shapes(benchmark::internal::Benchmark* cases) {
  cases->ArgNames({"tokens", "hidden", "columns", "threads", "tile_rows", "tile_columns"});
  for (const int64_t hidden : {512, 1024, 2048})
    for (const int64_t columns : {4096, 16384}) cases->Args({2048, hidden, columns, 1, 0, 0});
  cases->Args({2048, 1024, 16384, 2, 0, 0});
  cases->Args({2048, 1024, 4096, 1, 128, 512})->Args({2048, 1024, 4096, 1, 1024, 256});
  cases->UseManualTime()->Iterations(3)->Unit(benchmark::kMillisecond);
}
BENCHMARK(fused_linear<float>)->Apply(shapes);
BENCHMARK(fused_linear<bf16>)->Apply(shapes);

}  // namespace
}  // namespace gyre
