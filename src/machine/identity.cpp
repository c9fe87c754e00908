#include "machine/identity.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "comm/agree.hpp"
#include "comm/collective.hpp"
#include "machine/json_fields.hpp"
#include "machine/system_files.hpp"
#include "runtime/host.hpp"
#include "runtime/mpi_env.hpp"
#include "runtime/mpi_transport.hpp"

namespace gyre {
namespace {

using detail::FieldReader;
using detail::FieldWriter;

template <class T>
std::string packed(const T& value) {
  return dump_json(FieldWriter()(value));
}

template <class T>
T unpacked(const std::string& text) {
  T value;
  const char* const source = "a rank's message";
  FieldReader{source}(parse_json(source, text, "JSON"), "", value);
  return value;
}

bool close(int64_t a, int64_t b) {
  return 100 * std::abs(a - b) <= std::max(a, b);
}

/// Whether two hosts differ only in name and slightly in memory, of which the kernel reserves a
/// part.
bool same_kind(const HostIdentity& a, HostIdentity b) {
  if (a.numa.size() != b.numa.size() || !close(a.memory_bytes, b.memory_bytes)) return false;
  b.host = a.host;
  b.memory_bytes = a.memory_bytes;
  for (size_t i = 0; i < a.numa.size(); ++i) {
    if (!close(a.numa[i].memory_bytes, b.numa[i].memory_bytes)) return false;
    b.numa[i].memory_bytes = a.numa[i].memory_bytes;
  }
  return a == b;
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Host, CPUs and NUMA nodes of this rank, one per line.
std::string placement_text() {
  const std::string folder = "/sys/devices/system/node/";
  std::vector<NumaNode> nodes;
  for (const int node : parse_cpu_list(read_small_file(folder + "online")))
    nodes.push_back({node, read_small_file(fmt::format("{}node{}/cpulist", folder, node)), 0});
  const std::string cpus =
      value_in(read_small_file("/proc/thread-self/status"), "Cpus_allowed_list");
  return fmt::format("{}\n{}\n{}", host_name(), cpus, numa_of(cpus, nodes));
}

/// MPI library, and transports from the first rank to others.
MpiIdentity find_mpi(const std::vector<RankPlacement>& ranks) {
  MpiIdentity mpi{MpiEnvironment::library_version(), mpich_device(), transport_version(), {}, {}};
  const auto to_first = [&](auto is_wanted) -> MpiRoute {
    const auto peer = std::find_if(ranks.begin() + 1, ranks.end(), is_wanted);
    if (peer == ranks.end()) return {};
    const UcxLanes lanes = lanes_to(peer->rank, static_cast<int>(ranks.size()));
    return {lanes.small, lanes.large};
  };
  const std::string& host = ranks.front().host;
  mpi.inside_host = to_first([&](const RankPlacement& rank) { return rank.host == host; });
  mpi.between_hosts = to_first([&](const RankPlacement& rank) { return rank.host != host; });
  return mpi;
}

SlurmIdentity find_slurm() {
  return {variable("SLURM_JOB_ID"), variable("SLURM_CLUSTER_NAME"), variable("SLURM_JOB_PARTITION"),
          variable("SLURM_JOB_NODELIST")};
}

}  // namespace

MachineIdentity find_machine(Communicator& world) {
  const int me = world.rank();
  MachineIdentity machine;
  for (const std::string& text : all_gather_texts(world, {placement_text()})) {
    const size_t cpus = text.find('\n'), numa = text.find('\n', cpus + 1);
    machine.ranks.push_back({static_cast<int>(machine.ranks.size()), text.substr(0, cpus),
                             text.substr(cpus + 1, numa - cpus - 1), text.substr(numa + 1)});
  }
  const auto first = std::ranges::find(machine.ranks, host_name(), &RankPlacement::host);
  std::string host;
  run_agreed(world, "inspecting the machine", [&] {
    if (first->rank == me) host = packed(find_host());
  });
  for (const std::string& text : all_gather_texts(world, {host}))
    if (!text.empty()) machine.hosts.push_back(unpacked<HostIdentity>(text));
  std::string mpi, slurm;
  run_on_root(world, "inspecting MPI", [&] {
    mpi = packed(find_mpi(machine.ranks));
    slurm = packed(find_slurm());
  });
  machine.mpi = unpacked<MpiIdentity>(broadcast_string(world, mpi, 0));
  machine.slurm = unpacked<SlurmIdentity>(broadcast_string(world, slurm, 0));
  return machine;
}

std::vector<std::vector<const HostIdentity*>> kinds_of_hosts(
    const std::vector<HostIdentity>& hosts) {
  std::vector<std::vector<const HostIdentity*>> kinds;
  for (const HostIdentity& host : hosts) {
    const auto known =
        std::ranges::find_if(kinds, [&](const auto& kind) { return same_kind(*kind[0], host); });
    if (known == kinds.end())
      kinds.push_back({&host});
    else
      known->push_back(&host);
  }
  return kinds;
}

std::vector<int> first_ranks(const MachineIdentity& machine) {
  std::vector<int> firsts;
  for (const HostIdentity& host : machine.hosts)
    firsts.push_back(std::ranges::find(machine.ranks, host.host, &RankPlacement::host)->rank);
  return firsts;
}

int host_index(const MachineIdentity& machine, int rank) {
  const std::string& host = machine.ranks[rank].host;
  const auto found = std::ranges::find(machine.hosts, host, &HostIdentity::host);
  return static_cast<int>(found - machine.hosts.begin());
}

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = [&] {
    int value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc() || value < 0) throw_runtime("'{}' is no list of CPUs", text);
    at = next;
    return value;
  };
  while (at != end) {
    const int first = number();
    int last = first;
    if (at != end && *at == '-') {
      ++at;
      last = number();
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
    if (at == end) break;
    if (*at != ',') throw_runtime("'{}' is no list of CPUs", text);
    ++at;
  }
  return cpus;
}

std::string numa_of(const std::string& cpus, const std::vector<NumaNode>& nodes) {
  const std::vector<int> wanted = parse_cpu_list(cpus);
  std::vector<std::string> found;
  for (const NumaNode& node : nodes) {
    const std::vector<int> here = parse_cpu_list(node.cpus);
    const auto is_here = [&](int cpu) { return std::ranges::find(here, cpu) != here.end(); };
    if (std::ranges::any_of(wanted, is_here)) found.push_back(std::to_string(node.index));
  }
  return fmt::format("{}", fmt::join(found, ","));
}

}  // namespace gyre
