#include "machine/rates.hpp"

#include <algorithm>
#include <limits>

#include "comm/agree.hpp"
#include "core/index.hpp"
#include "runtime/buffer.hpp"
#include "runtime/peak.hpp"

namespace gyre {
namespace {

int64_t largest(Communicator& world, int64_t mine) {
  return all_reduce_value(world, mine, ReduceOp::max);
}

/// Bytes per second of the fastest of ten runs of `submit`, which moves `bytes`.
template <class Submit>
double device_rate(Stream& stream, int64_t bytes, Submit submit) {
  double fastest = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 10; ++i) {
    const MarkPtr begin = stream.mark();
    submit();
    const MarkPtr end = stream.mark();
    stream.synchronize();
    fastest = std::min(fastest, end->seconds() - begin->seconds());
  }
  return fastest > 0 ? static_cast<double>(bytes) / fastest : 0;
}

}  // namespace

MachineRates measure_rates(int64_t bytes, int threads, Communicator& world, Stream& stream) {
  if (stream.space() == MemorySpace::host) return measure_rates(bytes, threads, world);
  constexpr int64_t most = int64_t{1} << 29, line = 512;
  MachineRates rates;
  rates.array_bytes = round_up(std::min(largest(world, bytes), most), 2 * line);
  if (rates.array_bytes < least_measured_bytes) return rates;
  Buffer<std::byte> array(rates.array_bytes, MemorySpace::device);
  const int64_t half = array.size() / 2;
  const auto slowest = [&](double rate) { return all_reduce_value(world, rate, ReduceOp::min); };
  world.barrier(stream, "before measuring memory")->wait();
  const auto fill = [&] { stream.fill(array.data(), std::byte{0}, array.size()); };
  const auto copy = [&] { stream.copy(array.data() + half, array.data(), half); };
  const double filled = device_rate(stream, array.size(), fill);
  const double copied = device_rate(stream, 2 * half, copy);
  rates.fill = slowest(filled);
  rates.copy = slowest(copied);
  return rates;
}

MachineRates measure_rates(int64_t bytes, int threads, Communicator& world) {
  constexpr int64_t most = int64_t{1} << 26, line = 64;
  MachineRates mine;
  mine.flops = threads * measured_fma_peak();
  const auto slowest = [&](double rate) { return all_reduce_value(world, rate, ReduceOp::min); };
  mine.flops = slowest(mine.flops);
  mine.array_bytes = round_up(std::min(largest(world, bytes), most), 2 * line);
  if (mine.array_bytes < least_measured_bytes) return mine;
  const int64_t count = mine.array_bytes / static_cast<int64_t>(sizeof(float));
  Buffer<float> array(count);
  std::ranges::fill(array.span(), 0.0F);
  const auto half = array.size() / 2;
  HostStream stream;
  world.barrier(stream, "before measuring memory")->wait();
  mine.read = measured_read_rate(array.span(), threads);
  mine.update = measured_update_rate(array.span(), threads);
  mine.copy = measured_copy_rate(array.span().first(half), array.span().last(half), threads);
  for (double* rate : {&mine.read, &mine.update, &mine.copy}) *rate = slowest(*rate);
  return mine;
}

}  // namespace gyre
