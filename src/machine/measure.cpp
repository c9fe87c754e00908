#include "machine/measure.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "comm/agree.hpp"
#include "machine/load.hpp"
#include "machine/measure_detail.hpp"
#include "machine/rates.hpp"

namespace gyre {

void detail::sleep_until_all_are_here(Communicator& world) {
  HostStream stream;
  const WorkPtr barrier = world.barrier(stream, "all ranks between two measurements");
  while (!barrier->test()) usleep(1000);
  barrier->wait();
}

Sampled best_of(std::vector<double> samples) {
  const double best = samples.empty() ? 0 : std::ranges::max(samples);
  return {best, std::move(samples)};
}

Sampled median_of(std::vector<double> samples) {
  if (samples.empty()) return {};
  std::vector<double> sorted = samples;
  std::ranges::sort(sorted);
  const size_t middle = sorted.size() / 2;
  const bool even = sorted.size() % 2 == 0;
  const double median = even ? (sorted[middle - 1] + sorted[middle]) / 2 : sorted[middle];
  return {median, std::move(samples)};
}

MeasuredMachine measure_machine(const MachineIdentity& machine, const MeasuredTransport& transport,
                                const MeasureOptions& options) {
  Communicator& world = transport.world;
  const std::unique_ptr<Communicator> host = world.split(host_index(machine, world.rank()));
  MeasuredMachine measured;
  measured.backend = transport.data.space() == MemorySpace::device ? "cuda" : "cpu";
  measured.comm = transport.data.backend();
  measured.ranks = world.size();
  measured.ranks_of_a_host =
      static_cast<int>(all_reduce_value(world, int64_t{host->size()}, ReduceOp::max));
  measured.threads = options.threads;
  measured.window_seconds = options.window_seconds;
  const HostLoad before = host_load();
  measured.rates = detail::measure_core_rates(machine, world, options);
  measured.messages = detail::measure_messages(machine, transport, options.window_seconds);
  if (transport.data.space() == MemorySpace::device) {
    const MachineRates rates =
        measure_rates(int64_t{1} << 29, options.threads, world, transport.stream);
    measured.gpu = {
        "fills and copies of an array in GPU memory, best of 10 by marks on the stream; bytes "
        "read and written both count; all ranks at once, the slowest",
        rates.array_bytes, rates.fill, rates.copy};
  }
  std::vector<std::string> hosts;
  for (const RankPlacement& rank : machine.ranks) hosts.push_back(rank.host);
  const double others = foreign_load(world, hosts, before, host_load()).cores;
  measured.cores_used_by_others = std::isnan(others) ? 0 : others;
  return measured;
}

}  // namespace gyre
