// Identity of a host: topology from hwloc, the rest from Linux system files.

#include "runtime/host.hpp"

#include <cpuid.h>
#include <hwloc.h>
#include <hwy/highway.h>
#include <sys/utsname.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include "core/error.hpp"
#include "machine/identity.hpp"
#include "machine/system_files.hpp"

namespace gyre {
namespace {

/// Topology of the whole machine, including parts that this process may not use. Leaves out what is
/// slow to find: devices, and CPUID data, for which hwloc would visit every processor.
class Topology {
 public:
  Topology() {
    require(hwloc_topology_init(&topology_) == 0);
    hwloc_topology_set_components(topology_, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, "x86");
    hwloc_topology_set_flags(topology_, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
    hwloc_topology_set_io_types_filter(topology_, HWLOC_TYPE_FILTER_KEEP_NONE);
    hwloc_topology_set_type_filter(topology_, HWLOC_OBJ_MISC, HWLOC_TYPE_FILTER_KEEP_NONE);
    require(hwloc_topology_load(topology_) == 0);
  }
  ~Topology() { hwloc_topology_destroy(topology_); }
  Topology(const Topology&) = delete;
  Topology& operator=(const Topology&) = delete;

  int count(hwloc_obj_type_t type) const { return hwloc_get_nbobjs_by_type(topology_, type); }
  hwloc_obj_t object(hwloc_obj_type_t type, int i) const {
    return hwloc_get_obj_by_type(topology_, type, static_cast<unsigned>(i));
  }
  /// Returns a property of the first socket, or else of the machine.
  std::string property(const char* name) const {
    for (const hwloc_obj_type_t type : {HWLOC_OBJ_PACKAGE, HWLOC_OBJ_MACHINE})
      if (hwloc_obj_t thing = object(type, 0))
        if (const char* text = hwloc_obj_get_info_by_name(thing, name)) return text;
    return "";
  }

 private:
  static void require(bool good) {
    if (!good) throw_runtime("hwloc cannot read the topology of host {}", host_name());
  }
  hwloc_topology_t topology_ = nullptr;
};

std::string list_of(hwloc_const_bitmap_t set) {
  char* text = nullptr;
  if (hwloc_bitmap_list_asprintf(&text, set) < 0) return "";
  const std::unique_ptr<char, void (*)(void*)> owner(text, std::free);
  return text;
}

int64_t number_in(const std::string& text) {
  int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

void add_topology(const Topology& topology, HostIdentity& host) {
  host.sockets = topology.count(HWLOC_OBJ_PACKAGE);
  host.cores = topology.count(HWLOC_OBJ_CORE);
  host.threads = topology.count(HWLOC_OBJ_PU);
  host.cpu = topology.property("CPUModel");
  host.cpu_family = static_cast<int>(number_in(topology.property("CPUFamilyNumber")));
  host.cpu_model = static_cast<int>(number_in(topology.property("CPUModelNumber")));
  host.cpu_stepping = static_cast<int>(number_in(topology.property("CPUStepping")));
  for (int i = 0; i < topology.count(HWLOC_OBJ_NUMANODE); ++i) {
    const hwloc_obj_t node = topology.object(HWLOC_OBJ_NUMANODE, i);
    host.numa.push_back({static_cast<int>(node->os_index), list_of(node->cpuset),
                         static_cast<int64_t>(node->attr->numanode.local_memory)});
  }
  for (const auto& [name, type] :
       {std::pair{"L1d", HWLOC_OBJ_L1CACHE}, {"L2", HWLOC_OBJ_L2CACHE}, {"L3", HWLOC_OBJ_L3CACHE}})
    if (const hwloc_obj_t cache = topology.object(type, 0))
      host.caches.push_back(
          {name, static_cast<int64_t>(cache->attr->cache.size), topology.count(type)});
}

/// Adds governor, boost and highest clock, which a virtual machine does not report.
void add_clocks(HostIdentity& host) {
  const std::string cpus = "/sys/devices/system/cpu/";
  const auto of_cpu = [&](int cpu, const std::string& file) {
    return read_small_file(cpus + "cpu" + std::to_string(cpu) + "/cpufreq/" + file);
  };
  std::vector<std::string> governors;
  for (int cpu = 0; cpu < host.threads; ++cpu) {
    governors.push_back(of_cpu(cpu, "scaling_governor"));
    if (governors.back().empty()) break;
  }
  host.governor = joined_kinds(governors);
  if (const int64_t khz = number_in(of_cpu(0, "cpuinfo_max_freq")); khz > 0)
    host.max_mhz = static_cast<int>(khz / 1000);
  if (const std::string boost = read_small_file(cpus + "cpufreq/boost"); !boost.empty())
    host.boost = boost == "1" ? "on" : "off";
  if (const std::string off = read_small_file(cpus + "intel_pstate/no_turbo"); !off.empty())
    host.boost = off == "0" ? "on" : "off";
}

/// Adds the GPUs listed by NVIDIA's driver: initialising CUDA would be slow.
void add_gpus(HostIdentity& host) {
  const std::filesystem::path driver = "/proc/driver/nvidia";
  std::error_code none;
  for (const auto& gpu : std::filesystem::directory_iterator(driver / "gpus", none))
    host.gpus.push_back(value_in(read_small_file(gpu.path() / "information"), "Model"));
  host.gpu_driver = read_small_file("/sys/module/nvidia/version");
}

/// Tests a CPUID bit that is 0 on processors and set by hypervisors.
bool has_hypervisor() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 31) != 0;
}

}  // namespace

HostIdentity find_host() {
  HostIdentity host;
  host.host = host_name();
  add_topology(Topology(), host);
  add_clocks(host);
  add_gpus(host);
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  host.simd = hwy::TargetName(targets & -targets);  // the best target is the lowest bit
  host.memory_bytes = 1024 * number_in(value_in(read_small_file("/proc/meminfo"), "MemTotal"));
  host.huge_pages = chosen_in(read_small_file("/sys/kernel/mm/transparent_hugepage/enabled"));
  host.system = value_in(read_small_file("/etc/os-release"), "PRETTY_NAME");
  utsname system{};
  if (uname(&system) == 0) host.kernel = std::string(system.sysname) + " " + system.release;
  host.virtual_machine = has_hypervisor();
  return host;
}

}  // namespace gyre
