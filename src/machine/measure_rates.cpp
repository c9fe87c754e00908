// Rates of cores and memory, in windows of wall-clock time.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "comm/agree.hpp"
#include "core/index.hpp"
#include "machine/measure_detail.hpp"
#include "runtime/buffer.hpp"
#include "runtime/clock.hpp"
#include "runtime/parallel.hpp"
#include "runtime/peak.hpp"

namespace gyre {
namespace {

struct KindOfWork {
  CoreWork work;
  Sampled WorkRates::*rate;
};
constexpr std::array kinds_of_work = {
    KindOfWork{CoreWork::fma, &WorkRates::fma}, KindOfWork{CoreWork::read, &WorkRates::read},
    KindOfWork{CoreWork::update, &WorkRates::update}, KindOfWork{CoreWork::copy, &WorkRates::copy}};

/// Work per second of this rank. All ranks of `group`, on one host, start together and stop at the
/// end of the window. One thread of one rank counts CPU time, without other processes' use of its
/// core; otherwise wall-clock time counts, because ranks and threads share cores.
double rate_in_window(Communicator& group, CoreWork work, std::span<float> array, int threads,
                      double seconds) {
  constexpr double delay = 1e-3;  // all ranks learn `begin` before it comes
  const double begin = all_reduce_value(group, monotonic_seconds(), ReduceOp::max) + delay;
  while (monotonic_seconds() < begin) {
  }
  const double cpu_begin = thread_cpu_seconds();
  double done = 0, now = begin;
  while (now < begin + seconds) {
    done += do_core_work(work, array, threads);
    now = monotonic_seconds();
  }
  const bool by_itself = group.size() == 1 && threads == 1;
  return done / (by_itself ? thread_cpu_seconds() - cpu_begin : now - begin);
}

/// Bytes of the array: 4 x the largest cache, at most 1/8 of the rank's memory; 64 MiB to 1 GiB.
int64_t array_bytes(const MachineIdentity& machine, int rank) {
  constexpr int64_t least = int64_t{64} << 20, most = int64_t{1} << 30, unit = 4096;
  const HostIdentity& host = machine.hosts[host_index(machine, rank)];
  int64_t cache = 0;
  for (const CacheKind& kind : host.caches) cache = std::max(cache, kind.bytes);
  const int64_t ranks = std::ranges::count(machine.ranks, host.host, &RankPlacement::host);
  const int64_t share = host.memory_bytes / ranks / 8;
  return round_up(std::clamp(4 * cache, least, std::clamp(share, least, most)), unit);
}

}  // namespace

MeasuredRates detail::measure_core_rates(const MachineIdentity& machine, Communicator& world,
                                         const MeasureOptions& options) {
  const int rank = world.rank();
  const std::unique_ptr<Communicator> host = world.split(host_index(machine, rank));
  const std::unique_ptr<Communicator> alone = world.split(rank);
  MeasuredRates rates;
  rates.how = fmt::format(
      "work in a window of {} s, best of {}; multiply-adds of f32 on registers count as two; "
      "memory: an array of a rank, bytes read and written both count, copies by non-temporal "
      "stores; one rank: while the others sleep, a second of its CPU time (with more threads, of "
      "wall-clock time); all ranks: the sum of a host's, which begin at once, a second of "
      "wall-clock time, of the slowest host",
      options.window_seconds, samples_of_a_rate);
  rates.array_bytes = all_reduce_value(world, array_bytes(machine, rank), ReduceOp::max);
  Buffer<float> array;
  run_agreed(world, "an array to measure memory with", [&] {
    array = Buffer<float>(rates.array_bytes / static_cast<int64_t>(sizeof(float)));
    const int64_t slice = ceil_div(array.size(), options.threads);
    for_each_task(options.threads, options.threads, [&](int64_t task, int) {
      const int64_t begin = std::min(task * slice, array.size());
      std::fill_n(array.data() + begin, std::min(slice, array.size() - begin), 0.0F);
    });
  });
  const auto sample = [&](Communicator& group, CoreWork work, int threads) {
    std::vector<double> samples;
    for (int i = 0; i < samples_of_a_rate; ++i)
      samples.push_back(rate_in_window(group, work, array.span(), threads, options.window_seconds));
    return samples;
  };
  sleep_until_all_are_here(world);
  if (rank == 0) {
    rates.one_core_fma = best_of(sample(*alone, CoreWork::fma, 1));
    for (const KindOfWork& kind : kinds_of_work)
      rates.one_rank.*kind.rate = best_of(sample(*alone, kind.work, options.threads));
  }
  sleep_until_all_are_here(world);
  for (const KindOfWork& kind : kinds_of_work) {
    std::vector<double> samples = sample(*host, kind.work, options.threads);
    for (double& rate : samples)
      rate = all_reduce_value(world, all_reduce_value(*host, rate, ReduceOp::sum), ReduceOp::min);
    rates.all_ranks.*kind.rate = best_of(std::move(samples));
  }
  return rates;
}

}  // namespace gyre
