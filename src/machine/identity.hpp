#pragma once
// Which machine a run is on: what does not need measuring, and takes microseconds to a few
// milliseconds to find.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.hpp"

namespace gyre {

struct NumaNode {
  int index = 0;
  std::string cpus;  ///< hardware threads, "0-3,8"
  int64_t memory_bytes = 0;
  bool operator==(const NumaNode&) const = default;
};

/// All caches of one kind.
struct CacheKind {
  std::string name;   ///< "L1d", "L2", "L3"
  int64_t bytes = 0;  ///< of one
  int count = 0;      ///< on the host
  bool operator==(const CacheKind&) const = default;
};

/// One host. Texts that are not known are "", numbers 0.
struct HostIdentity {
  std::string host;
  std::string cpu;  ///< as the processor calls itself
  int cpu_family = 0, cpu_model = 0, cpu_stepping = 0;
  std::string simd;  ///< the best instruction set that this build has code for, as Highway names it
  int sockets = 0, cores = 0;
  int threads = 0;  ///< hardware threads of all cores
  std::vector<NumaNode> numa;
  std::vector<CacheKind> caches;
  int64_t memory_bytes = 0;
  std::string huge_pages;  ///< transparent ones: "always", "madvise" or "never"
  std::string governor;    ///< of the clocks: "performance"; several are joined by "+"
  std::string boost;       ///< clocks above the nominal one: "on" or "off"
  std::optional<int> max_mhz;
  std::string kernel;             ///< "Linux 6.1.0-13-amd64"
  std::string system;             ///< "Debian GNU/Linux 12 (bookworm)"
  bool virtual_machine = false;   ///< the processor says that there is a hypervisor
  std::vector<std::string> gpus;  ///< models, as NVIDIA's driver lists them
  std::string gpu_driver;         ///< its version
  bool operator==(const HostIdentity&) const = default;
};

/// Where the processes of MPI send what they send.
struct MpiRoute {
  std::string small;  ///< transport and device of short messages: "sysv/memory", "tcp/eth0"
  std::string large;  ///< of long ones; several are joined by "+"
  bool operator==(const MpiRoute&) const = default;
};

struct MpiIdentity {
  std::string library;    ///< "MPICH 4.0.2"
  std::string device;     ///< "ch4:ucx": MPICH's device and netmod
  std::string transport;  ///< "UCX 1.13.1"
  /// From the first rank to another one of its host, and to one of another host. Unknown where
  /// there is no such rank, and without UCX.
  MpiRoute inside_host, between_hosts;
  bool operator==(const MpiIdentity&) const = default;
};

struct SlurmIdentity {
  std::string job;  ///< "" outside of Slurm
  std::string cluster, partition, nodes;
  bool operator==(const SlurmIdentity&) const = default;
};

struct RankPlacement {
  int rank = 0;
  std::string host;
  std::string cpus;  ///< hardware threads that the rank may run on, "0-3"
  std::string numa;  ///< NUMA nodes that have them, "0"
  bool operator==(const RankPlacement&) const = default;
};

struct MachineIdentity {
  std::vector<HostIdentity> hosts;   ///< in order of their first ranks
  std::vector<RankPlacement> ranks;  ///< in order of rank
  MpiIdentity mpi;
  SlurmIdentity slurm;
  bool operator==(const MachineIdentity&) const = default;
};

/// All of the machine, the same on all ranks. The first rank of each host looks at it. Collective,
/// over all ranks: four small all-gathers.
MachineIdentity find_machine(Communicator& world);

/// This host.
HostIdentity find_host();

/// Hosts of one kind each, in order of their first: they differ in their names, and by less than a
/// hundredth in their memory, of which the kernel keeps some. They point into `hosts`.
std::vector<std::vector<const HostIdentity*>> kinds_of_hosts(
    const std::vector<HostIdentity>& hosts);

/// The first rank of each host, in order.
std::vector<int> first_ranks(const MachineIdentity& machine);
/// The place of a rank's host among machine.hosts.
int host_index(const MachineIdentity& machine, int rank);

/// The numbers of a list of Linux: "0-2,8" is 0, 1, 2, 8. Throws a runtime error for another text.
std::vector<int> parse_cpu_list(const std::string& text);

/// The NUMA nodes that have any of `cpus`, as such a list; "" when none does.
std::string numa_of(const std::string& cpus, const std::vector<NumaNode>& nodes);

}  // namespace gyre
