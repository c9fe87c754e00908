#include "machine/load.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>

#include "comm/agree.hpp"
#include "runtime/clock.hpp"

namespace gyre {
namespace {

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

/// Sums the busy ticks of the line "cpu user nice system idle iowait irq softirq steal ...".
double busy_seconds() {
  std::ifstream file("/proc/stat");
  std::string name;
  double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, irq = 0, softirq = 0, steal = 0;
  if (!(file >> name >> user >> nice >> system >> idle >> waiting >> irq >> softirq >> steal))
    return std::numeric_limits<double>::quiet_NaN();
  return (user + nice + system + irq + softirq + steal) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace

HostLoad host_load() {
  HostLoad load;
  load.wall_seconds = monotonic_seconds();
  load.busy_seconds = busy_seconds();
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage{};
    getrusage(who, &usage);
    load.own_seconds += seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
  }
  load.cores = sysconf(_SC_NPROCESSORS_ONLN);
  return load;
}

ForeignLoad foreign_load(Communicator& world, const std::vector<std::string>& hosts,
                         const HostLoad& begin, const HostLoad& end) {
  constexpr double shortest = 0.1;  // seconds: ten ticks
  const double wall = end.wall_seconds - begin.wall_seconds;
  const bool known = wall >= shortest;
  const double per_second = known ? 1 / wall : std::numeric_limits<double>::quiet_NaN();
  const auto gather = [&](double value) { return all_gather_value(world, value); };
  const std::vector<double> busy = gather((end.busy_seconds - begin.busy_seconds) * per_second);
  const std::vector<double> own = gather((end.own_seconds - begin.own_seconds) * per_second);
  const std::vector<double> cores = gather(end.cores);
  std::map<std::string, std::vector<size_t>> ranks_of_host;
  for (size_t r = 0; r < hosts.size(); ++r) ranks_of_host[hosts[r]].push_back(r);
  ForeignLoad worst{"", std::numeric_limits<double>::quiet_NaN(), end.cores};
  for (const auto& [name, ranks] : ranks_of_host) {
    double foreign = busy[ranks.front()];
    for (const size_t r : ranks) foreign -= own[r];
    if (!std::isnan(foreign) && !(foreign <= worst.cores))
      worst = {name, std::max(0.0, foreign), static_cast<int64_t>(cores[ranks.front()])};
  }
  return worst;
}

}  // namespace gyre
