#pragma once
// Fields of the structs that describe a machine, with their names in gyre-machine/1. Writing,
// reading and communication between ranks all use the same list per struct.

#include <concepts>
#include <type_traits>

#include "machine/identity.hpp"
#include "machine/measured.hpp"

namespace gyre {

template <class T, class Struct>
concept FieldsOf = std::same_as<std::remove_const_t<T>, Struct>;

/// Calls f(name, field) for each field of a NumaNode; overloads for the other structs follow.
template <FieldsOf<NumaNode> T, class F>
void for_each_field(T& node, F f) {
  f("index", node.index);
  f("cpus", node.cpus);
  f("memory_bytes", node.memory_bytes);
}

template <FieldsOf<CacheKind> T, class F>
void for_each_field(T& cache, F f) {
  f("name", cache.name);
  f("bytes", cache.bytes);
  f("count", cache.count);
}

template <FieldsOf<HostIdentity> T, class F>
void for_each_field(T& host, F f) {
  f("host", host.host);
  f("cpu", host.cpu);
  f("cpu_family", host.cpu_family);
  f("cpu_model", host.cpu_model);
  f("cpu_stepping", host.cpu_stepping);
  f("simd", host.simd);
  f("sockets", host.sockets);
  f("cores", host.cores);
  f("threads", host.threads);
  f("numa", host.numa);
  f("caches", host.caches);
  f("memory_bytes", host.memory_bytes);
  f("huge_pages", host.huge_pages);
  f("governor", host.governor);
  f("boost", host.boost);
  f("max_mhz", host.max_mhz);
  f("kernel", host.kernel);
  f("system", host.system);
  f("virtual_machine", host.virtual_machine);
  f("gpus", host.gpus);
  f("gpu_driver", host.gpu_driver);
}

template <FieldsOf<MpiRoute> T, class F>
void for_each_field(T& route, F f) {
  f("small", route.small);
  f("large", route.large);
}

template <FieldsOf<MpiIdentity> T, class F>
void for_each_field(T& mpi, F f) {
  f("library", mpi.library);
  f("device", mpi.device);
  f("transport", mpi.transport);
  f("inside_host", mpi.inside_host);
  f("between_hosts", mpi.between_hosts);
}

template <FieldsOf<SlurmIdentity> T, class F>
void for_each_field(T& slurm, F f) {
  f("job", slurm.job);
  f("cluster", slurm.cluster);
  f("partition", slurm.partition);
  f("nodes", slurm.nodes);
}

template <FieldsOf<RankPlacement> T, class F>
void for_each_field(T& rank, F f) {
  f("rank", rank.rank);
  f("host", rank.host);
  f("cpus", rank.cpus);
  f("numa", rank.numa);
}

template <FieldsOf<MachineIdentity> T, class F>
void for_each_field(T& machine, F f) {
  f("hosts", machine.hosts);
  f("ranks", machine.ranks);
  f("mpi", machine.mpi);
  f("slurm", machine.slurm);
}

template <FieldsOf<Sampled> T, class F>
void for_each_field(T& figure, F f) {
  f("value", figure.value);
  f("samples", figure.samples);
}

template <FieldsOf<WorkRates> T, class F>
void for_each_field(T& rates, F f) {
  f("fma_flops_per_s", rates.fma);
  f("read_bytes_per_s", rates.read);
  f("update_bytes_per_s", rates.update);
  f("copy_bytes_per_s", rates.copy);
}

template <FieldsOf<MeasuredRates> T, class F>
void for_each_field(T& rates, F f) {
  f("how", rates.how);
  f("array_bytes", rates.array_bytes);
  f("one_core_fma_flops_per_s", rates.one_core_fma);
  f("one_rank", rates.one_rank);
  f("all_ranks_of_a_host", rates.all_ranks);
}

template <FieldsOf<MessageTime> T, class F>
void for_each_field(T& message, F f) {
  f("bytes", message.bytes);
  f("one_way_seconds", message.seconds);
}

template <FieldsOf<MeasuredLink> T, class F>
void for_each_field(T& link, F f) {
  f("ranks", link.ranks);
  f("alpha_seconds", link.alpha_seconds);
  f("bytes_per_s", link.bytes_per_s);
  f("messages", link.messages);
}

template <FieldsOf<MeasuredMessages> T, class F>
void for_each_field(T& messages, F f) {
  f("how", messages.how);
  f("inside_host", messages.inside_host);
  f("between_hosts", messages.between_hosts);
  f("all_at_once", messages.all_at_once);
}

template <FieldsOf<MeasuredGpu> T, class F>
void for_each_field(T& gpu, F f) {
  f("how", gpu.how);
  f("array_bytes", gpu.array_bytes);
  f("fill_bytes_per_s", gpu.fill);
  f("copy_bytes_per_s", gpu.copy);
}

template <FieldsOf<MeasuredMachine> T, class F>
void for_each_field(T& machine, F f) {
  f("time", machine.time);
  f("backend", machine.backend);
  f("comm", machine.comm);
  f("ranks", machine.ranks);
  f("ranks_of_a_host", machine.ranks_of_a_host);
  f("threads_of_a_rank", machine.threads);
  f("window_seconds", machine.window_seconds);
  f("cores_used_by_others", machine.cores_used_by_others);
  f("rates", machine.rates);
  f("messages", machine.messages);
  f("gpu", machine.gpu);
}

}  // namespace gyre
