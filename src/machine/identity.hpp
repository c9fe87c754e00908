#pragma once
// Identity of the machine of a run: properties that need no measurement and take microseconds to a
// few milliseconds to find.

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
  int64_t bytes = 0;  ///< per cache
  int count = 0;      ///< on the host
  bool operator==(const CacheKind&) const = default;
};

/// One host. Unknown texts are "", unknown numbers 0.
struct HostIdentity {
  std::string host;
  std::string cpu;  ///< the processor's own name
  int cpu_family = 0, cpu_model = 0, cpu_stepping = 0;
  std::string simd;  ///< best instruction set with code in this build, as named by Highway
  int sockets = 0, cores = 0;
  int threads = 0;  ///< hardware threads of all cores
  std::vector<NumaNode> numa;
  std::vector<CacheKind> caches;
  int64_t memory_bytes = 0;
  std::string huge_pages;  ///< transparent huge pages: "always", "madvise" or "never"
  std::string governor;    ///< clock governor: "performance"; several are joined by "+"
  std::string boost;       ///< clocks above nominal: "on" or "off"
  std::optional<int> max_mhz;
  std::string kernel;             ///< "Linux 6.1.0-13-amd64"
  std::string system;             ///< "Debian GNU/Linux 12 (bookworm)"
  bool virtual_machine = false;   ///< whether the processor reports a hypervisor
  std::vector<std::string> gpus;  ///< models, as listed by NVIDIA's driver
  std::string gpu_driver;         ///< driver version
  bool operator==(const HostIdentity&) const = default;
};

/// Transports of MPI between two processes.
struct MpiRoute {
  std::string small;  ///< transport and device for short messages: "sysv/memory", "tcp/eth0"
  std::string large;  ///< the same for long messages; several are joined by "+"
  bool operator==(const MpiRoute&) const = default;
};

struct MpiIdentity {
  std::string library;    ///< "MPICH 4.0.2"
  std::string device;     ///< "ch4:ucx": MPICH's device and netmod
  std::string transport;  ///< "UCX 1.13.1"
  /// Routes from the first rank to another rank of its host, and to a rank of another host. Unknown
  /// without such a rank, or without UCX.
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
  std::string numa;  ///< NUMA nodes of these threads, "0"
  bool operator==(const RankPlacement&) const = default;
};

struct MachineIdentity {
  std::vector<HostIdentity> hosts;   ///< in order of their first ranks
  std::vector<RankPlacement> ranks;  ///< in order of rank
  MpiIdentity mpi;
  SlurmIdentity slurm;
  bool operator==(const MachineIdentity&) const = default;
};

/// Identity of the machine, equal on all ranks; the first rank of each host inspects it. Collective
/// over all ranks: a few small all-gathers and broadcasts.
MachineIdentity find_machine(Communicator& world);

HostIdentity find_host();

/// Groups hosts by kind, in order of the first host of each. Hosts of one kind differ only in name,
/// and by less than 1% in memory, of which the kernel reserves a part. Pointers refer to `hosts`.
std::vector<std::vector<const HostIdentity*>> kinds_of_hosts(
    const std::vector<HostIdentity>& hosts);

/// First rank of each host, in order.
std::vector<int> first_ranks(const MachineIdentity& machine);
/// Index of a rank's host in machine.hosts.
int host_index(const MachineIdentity& machine, int rank);

/// Parses a Linux CPU list: "0-2,8" is 0, 1, 2, 8. Throws a runtime error for other texts.
std::vector<int> parse_cpu_list(const std::string& text);

/// NUMA nodes with any of `cpus`, as a CPU list; "" if there are none.
std::string numa_of(const std::string& cpus, const std::vector<NumaNode>& nodes);

}  // namespace gyre
