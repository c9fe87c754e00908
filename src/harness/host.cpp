#include "harness/host.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace gyre {
namespace {

int64_t ranks_here(const AppContext& context) {
  const auto& peers = context.mpi.peers();
  const std::string& host = peers[context.world.rank()].host;
  return std::count_if(peers.begin(), peers.end(),
                       [&](const PeerProcess& peer) { return peer.host == host; });
}

}  // namespace

int64_t memory_for_rank(const AppContext& context) {
  std::ifstream file("/proc/meminfo");
  std::string name;
  int64_t kilobytes = 0;
  for (std::string line; std::getline(file, line);)
    if (std::istringstream words(line); words >> name >> kilobytes && name == "MemAvailable:")
      return kilobytes * 1024 / ranks_here(context);
  return 0;
}

double ranks_per_core(const AppContext& context) {
  return static_cast<double>(ranks_here(context)) /
         static_cast<double>(sysconf(_SC_NPROCESSORS_ONLN));
}

std::string crowding(const AppContext& context, int threads) {
  const int64_t ranks = ranks_here(context), cores = sysconf(_SC_NPROCESSORS_ONLN);
  if (ranks * threads <= cores) return "";
  return fmt::format("{} ranks of {} threads on {} cores", ranks, threads, cores);
}

}  // namespace gyre
