#include "predict/calibrate.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

#include "comm/agree.hpp"
#include "core/bf16.hpp"
#include "runtime/buffer.hpp"
#include "runtime/clock.hpp"

namespace gyre {
namespace {

constexpr std::array<int64_t, 9> measured_sizes = {16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
constexpr std::array<int64_t, 3> diagonal_sizes = {256, 1024, 4096};
constexpr int64_t measured_heads = 2;
constexpr int samples_of_a_call = 3;
constexpr double least_seconds = 1e-3;  // of one sample

double mean_over_ranks(Communicator& world, double value) {
  return all_reduce_value(world, value, ReduceOp::sum) / world.size();
}

/// Arrays for the largest rectangle, and the kernel under test, which runs on parts of them.
class KernelUnderTest {
 public:
  KernelUnderTest(const CalibratedBackend& backend, DType type, int head_dim)
      : backend_(backend),
        type_(type),
        head_dim_(head_dim),
        kernel_(make_block_kernel(backend.stream, {"auto", type, backend.threads})),
        q_(activations(1), backend.stream.space()),
        kv_(activations(2), backend.stream.space()),
        d_out_(activations(1), backend.stream.space()),
        out_(measured_sizes.back() * width(), space()),
        d_q_(measured_sizes.back() * width(), space()),
        d_kv_(2 * measured_sizes.back() * width(), space()),
        lse_(measured_sizes.back() * measured_heads, space()),
        delta_(measured_sizes.back() * measured_heads, space()) {
    fill_inputs();
    for (Buffer<float>* buffer : {&out_, &d_q_, &d_kv_, &lse_, &delta_})
      backend_.stream.fill(buffer->data(), std::byte{0},
                           static_cast<size_t>(buffer->size()) * sizeof(float));
    backend_.stream.synchronize();
  }

  /// Runs the kernel once; `progress` is called as in a real run.
  void attend(Pass pass, const Rectangle& r, const std::function<void()>& progress = {}) {
    if (pass == Pass::forward) {
      ForwardBlock block;
      set(block, r);
      block.progress = progress;
      block.out = out_.matrix(r.q_length, width());
      block.lse = lse_.matrix(r.q_length, measured_heads);
      return kernel_->forward(block);
    }
    BackwardBlock block;
    set(block, r);
    block.progress = progress;
    block.d_out = typed(d_out_, r.q_length, width());
    block.lse = lse_.matrix(r.q_length, measured_heads);
    block.delta = delta_.matrix(r.q_length, measured_heads);
    block.d_q = d_q_.matrix(r.q_length, width());
    const MatrixView<float> d_kv = d_kv_.matrix(r.k_length, 2 * width());
    block.d_k = d_kv.columns_from(0, width());
    block.d_v = d_kv.columns_from(width(), width());
    kernel_->backward(block);
  }

  /// Seconds of a call. Collective.
  double seconds(Pass pass, const Rectangle& r) {
    return seconds_of_call(backend_, [&] { attend(pass, r); });
  }

 private:
  MemorySpace space() const { return backend_.stream.space(); }
  int64_t width() const { return measured_heads * head_dim_; }
  /// Bytes of `arrays` arrays with as many queries as the largest rectangle.
  int64_t activations(int64_t arrays) const {
    return arrays * measured_sizes.back() * width() * size_of(type_);
  }

  void fill_inputs() {
    std::minstd_rand random(1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (Buffer<std::byte>* buffer : {&q_, &kv_, &d_out_}) {
      Buffer<std::byte> host(buffer->size());
      const int64_t count = buffer->size() / size_of(type_);
      for (int64_t i = 0; i < count; ++i) {
        const float x = uniform(random);
        if (type_ == DType::f32)
          reinterpret_cast<float*>(host.data())[i] = x;
        else
          reinterpret_cast<bf16*>(host.data())[i] = to_bf16(x);
      }
      backend_.stream.copy(buffer->data(), host.data(), host.size());
      backend_.stream.synchronize();
    }
  }
  ConstMatrixRef typed(const Buffer<std::byte>& buffer, int64_t rows, int64_t cols) const {
    return {buffer.data(), type_, rows, cols, cols};
  }
  void set(BlockInput& in, const Rectangle& r) {
    in.heads = {.heads = measured_heads,
                .kv_heads = measured_heads,
                .head_dim = head_dim_,
                .scale = 1 / std::sqrt(static_cast<float>(head_dim_))};
    in.q = typed(q_, r.q_length, width());
    const ConstMatrixRef kv = typed(kv_, r.k_length, 2 * width());
    in.k = kv.columns_from(0, width());
    in.v = kv.columns_from(width(), width());
    in.rectangles = std::span(&r, 1);
  }

  const CalibratedBackend& backend_;
  DType type_;
  int head_dim_;
  std::unique_ptr<BlockKernel> kernel_;
  Buffer<std::byte> q_, kv_, d_out_;
  Buffer<float> out_, d_q_, d_kv_, lse_, delta_;
};

Rectangle rectangle_of(int64_t rows, int64_t keys, bool causal = false) {
  Rectangle r{0, rows, 0, keys, {}};
  r.mask.causal = causal;
  return r;
}

KernelSurface measure_surface(KernelUnderTest& kernel, Pass pass, DType type, int head_dim) {
  KernelSurface surface;
  surface.pass = pass;
  surface.type = type;
  surface.head_dim = head_dim;
  surface.launch_s = kernel.seconds(pass, rectangle_of(1, 1));
  const double flops = (pass == Pass::forward ? 4.0 : 10.0) * measured_heads * head_dim;
  for (const int64_t size : measured_sizes) surface.rows.push_back(static_cast<double>(size));
  surface.keys = surface.rows;
  for (const int64_t rows : measured_sizes)
    for (const int64_t keys : measured_sizes) {
      const double seconds = kernel.seconds(pass, rectangle_of(rows, keys));
      // The launch time is subtracted, but at least a third of a short call counts as work.
      const double work = std::max(seconds - surface.launch_s, seconds / 3);
      surface.flops_per_s.push_back(flops * static_cast<double>(rows * keys) / work);
    }
  std::vector<double> diagonals;
  for (const int64_t size : diagonal_sizes) {
    const double n = size;
    const Rectangle square = rectangle_of(size, size, true);
    const double expected =
        surface.launch_s + flops * static_cast<double>(square.pairs()) / surface.rate(n, n);
    diagonals.push_back((kernel.seconds(pass, square) - expected) /
                        static_cast<double>(measured_heads * mask_edge(square)));
  }
  surface.diagonal_s = std::max(0.0, median_of(diagonals).value);
  return surface;
}

/// Seconds that a kernel loses per second of a concurrent transfer, from 0 to 1. Each rank attends
/// while it sends to the next rank and receives from the previous one.
double measure_slowdown(const CalibratedBackend& b) {
  Communicator& world = b.world;
  if (world.size() == 1) return 0;
  HostStream host;
  constexpr int64_t bytes = int64_t{8} << 20;
  Buffer<std::byte> out(bytes, b.stream.space()), in(bytes, b.stream.space());
  b.stream.fill(out.data(), std::byte{0}, bytes);
  b.stream.synchronize();
  KernelUnderTest kernel(b, DType::f32, 64);
  const Rectangle square = rectangle_of(2048, 2048);
  const SendSlice send{(world.rank() + 1) % world.size(), {out.data(), bytes}};
  const RecvSlice receive{(world.rank() + world.size() - 1) % world.size(), {in.data(), bytes}};
  const auto timed = [&](bool computes, bool transfers) {
    std::vector<double> all;
    for (int i = 0; i < 2 * samples_of_a_call + 1; ++i) {
      world.barrier(host, "a transfer beside a kernel")->wait();
      const Stopwatch watch;
      WorkPtr work;
      if (transfers)
        work = b.data.exchange(std::span(&send, 1), std::span(&receive, 1), b.stream, "beside");
      if (computes)
        kernel.attend(Pass::forward, square, [&] {
          if (work) work->test();
        });
      if (work) work->wait();
      b.stream.synchronize();
      all.push_back(watch.seconds());
    }
    return mean_over_ranks(world, median_of(std::move(all)).value);
  };
  timed(true, true);
  const double transfer = timed(false, true), alone = timed(true, false), both = timed(true, true);
  return std::clamp((both - alone) / transfer, 0.0, 1.0);
}

/// A tier from message times: the time of the shortest message is the latency, the rest of each
/// time is the time on the link.
LinkTier tier_of(const MeasuredLink& link, const std::string& name, int ranks) {
  LinkTier tier;
  tier.name = name;
  tier.ranks = ranks;
  tier.latency_s = link.alpha_seconds;
  for (const MessageTime& message : link.messages) {
    const double seconds = message.seconds.value - tier.latency_s;
    const double bytes = message.bytes;
    if (seconds > 0) tier.curve.push_back({bytes, bytes / seconds});
  }
  tier.bytes_per_s = tier.curve.empty() ? link.bytes_per_s : tier.curve.back().bytes_per_s;
  return tier;
}

}  // namespace

double seconds_of_call(const CalibratedBackend& b, const std::function<void()>& call) {
  HostStream host;
  const auto timed = [&](int64_t calls) {
    b.stream.synchronize();
    const Stopwatch watch;
    for (int64_t i = 0; i < calls; ++i) call();
    b.stream.synchronize();
    return watch.seconds() / static_cast<double>(calls);
  };
  call();
  const double once = all_reduce_value(b.world, timed(1), ReduceOp::max);
  const auto calls = static_cast<int64_t>(std::ceil(least_seconds / std::max(once, 1e-7)));
  std::vector<double> all;
  for (int i = 0; i < samples_of_a_call; ++i) {
    b.world.barrier(host, "a call to be timed")->wait();
    all.push_back(timed(calls));
  }
  return mean_over_ranks(b.world, median_of(std::move(all)).value);
}

MachineModel calibrate(const CalibratedBackend& backend, const MeasuredMachine& measured,
                       const std::vector<int>& head_dims, const std::string& name) {
  MachineModel machine;
  machine.name = name;
  for (const DType type : activation_types)
    for (const int head_dim : head_dims) {
      KernelUnderTest kernel(backend, type, head_dim);
      for (const Pass pass : {Pass::forward, Pass::backward})
        machine.kernel.surfaces.push_back(measure_surface(kernel, pass, type, head_dim));
    }
  if (backend.stream.space() == MemorySpace::host)
    machine.recurrence = calibrate_recurrences(backend);
  machine.decoder = calibrate_decoder(backend);
  const double slowdown = measure_slowdown(backend);
  const MeasuredMessages& messages = measured.messages;
  if (messages.inside_host && messages.between_hosts)
    machine.links.push_back(tier_of(*messages.inside_host, "node", measured.ranks_of_a_host));
  if (messages.all_at_once)
    machine.links.push_back(
        tier_of(*messages.all_at_once, messages.between_hosts ? "switch" : "node", 0));
  for (LinkTier& tier : machine.links) tier.kernel_slowdown = slowdown;
  machine.copy_bytes_per_s =
      measured.gpu ? measured.gpu->copy
                   : measured.rates.all_ranks.copy.value / std::max(1, measured.ranks_of_a_host);
  return machine;
}

}  // namespace gyre
