#include "apps/info/report.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "apps/common/registry_options.hpp"
#include "apps/common/workload_options.hpp"
#include "apps/logprobs/registry.hpp"
#include "attention/kernels/make_kernel.hpp"
#include "attention/schedules/registry.hpp"
#include "core/special_values.hpp"
#include "harness/backend.hpp"
#include "machine/json.hpp"
#include "packing/bins.hpp"
#include "predict/machine_file.hpp"
#include "report/table.hpp"
#include "runtime/features.hpp"
#include "runtime/mpi_env.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace {

/// Names of one kind, such as "schedules".
struct Capability {
  std::string sort;
  std::vector<std::string> names;
};

std::vector<std::string> libraries() {
  std::vector<std::string> names;
  for (const auto& [name, built] : {std::pair{"cuda", with_cuda},
                                    {"nccl", with_nccl},
                                    {"cudnn", with_cudnn},
                                    {"gpu-aware-mpi", mpi_takes_gpu_memory()},
                                    {"software-gpu", software_gpu}})
    if (built) names.emplace_back(name);
  return names;
}

std::vector<std::string> kernels() {
  std::vector<std::string> names;
  for (const KernelKind& kind : kernel_kinds())
    if (kind.built) names.push_back(kind.name);
  return names;
}

/// Lists the features of this build, and the names that a run can choose from.
std::vector<Capability> capabilities() {
  return {{"features", libraries()},
          {"backends", built_backends()},
          {"transports", built_comms()},
          {"types", activation_type_names()},
          {"packers", names_of(bin_packers())},
          {"layouts", names_of(layout_kinds())},
          {"schedules", names_of(schedules())},
          {"attention_kernels", kernels()},
          {"operations", names_of(logprobs_operations())}};
}

constexpr size_t max_columns = 112;  // of a line
constexpr size_t max_ranks = 32;

std::string known(const std::string& text) {
  return text.empty() ? "n/a" : text;
}

/// "  label        text"; a long text is broken at blanks.
std::string line(const std::string& label, const std::string& text) {
  std::string lines = fmt::format("  {:<19}", label), rest = text;
  while (rest.size() > max_columns - 21) {
    const size_t blank = rest.rfind(' ', max_columns - 21);
    if (blank == std::string::npos) break;
    lines += rest.substr(0, blank) + "\n" + std::string(21, ' ');
    rest = rest.substr(blank + 1);
  }
  return lines + rest + "\n";
}

/// "48 KiB", "1.5 MiB", "24 GiB".
std::string binary_size(int64_t bytes) {
  double value = bytes;
  const char* unit = "B";
  for (const char* next : {"KiB", "MiB", "GiB"}) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  return fmt::format("{:.4g} {}", value, unit);
}

std::string processor_text(const HostIdentity& host) {
  return fmt::format("{} (family {}, model {}, stepping {}){}; runs code for {}", known(host.cpu),
                     host.cpu_family, host.cpu_model, host.cpu_stepping,
                     host.virtual_machine ? ", in a virtual machine" : "", host.simd);
}

std::string host_text(const std::vector<const HostIdentity*>& kind) {
  const HostIdentity& host = *kind.front();
  std::string text = fmt::format("host {}", host.host);
  if (kind.size() > 1)
    text += fmt::format(" and {} of its kind, to {}", count_text(std::ssize(kind) - 1, "other"),
                        kind.back()->host);
  text += "\n" + line("processor", processor_text(host));
  text += line("cores",
               fmt::format("{} in {}, {} in all", host.cores, count_text(host.sockets, "socket"),
                           count_text(host.threads, "hardware thread")));
  std::vector<std::string> nodes, caches;
  for (const NumaNode& node : host.numa)
    nodes.push_back(fmt::format("{} (cpus {}, {})", node.index, known(node.cpus),
                                binary_size(node.memory_bytes)));
  for (const CacheKind& cache : host.caches)
    caches.push_back(fmt::format("{} x {} {}", cache.count, cache.name, binary_size(cache.bytes)));
  text += line("NUMA nodes", known(fmt::format("{}", fmt::join(nodes, ", "))));
  text += line("caches", known(fmt::format("{}", fmt::join(caches, ", "))));
  text += line("memory", fmt::format("{}, transparent huge pages {}",
                                     binary_size(host.memory_bytes), known(host.huge_pages)));
  text += line("clocks", fmt::format("governor {}, boost {}, {} MHz at most", known(host.governor),
                                     known(host.boost),
                                     host.max_mhz ? std::to_string(*host.max_mhz) : "n/a"));
  text += line("GPUs", host.gpus.empty() ? std::string("none")
                                         : fmt::format("{}, driver {}", fmt::join(host.gpus, ", "),
                                                       known(host.gpu_driver)));
  return text + line("system", fmt::format("{}, {}", known(host.system), known(host.kernel)));
}

std::string route_text(const MpiRoute& route) {
  if (route.small.empty() && route.large.empty()) return "n/a";
  return fmt::format("short messages by {}, long ones by {}", known(route.small),
                     known(route.large));
}

std::string rank_table(const RunReport& report) {
  struct Row {
    const RankPlacement& place;
    const std::string& device;
  };
  static const Table<Row> table({
      {"rank", "", 6, 0, [](const Row& r) { return int64_t{r.place.rank}; }},
      {"host", "", 12, 0, [](const Row& r) { return r.place.host; }, Align::left},
      {"cpus", "", 12, 0, [](const Row& r) { return known(r.place.cpus); }, Align::left},
      {"numa", "", 6, 0, [](const Row& r) { return known(r.place.numa); }, Align::left},
      {"device", "", 8, 0, [](const Row& r) { return r.device; }, Align::left},
  });
  const std::vector<RankPlacement>& ranks = report.machine.identity.ranks;
  std::vector<Row> rows;
  for (size_t i = 0; i < std::min(max_ranks, ranks.size()); ++i)
    rows.push_back({ranks[i], report.ranks[i].device});
  std::string text = table.text(rows);
  if (ranks.size() > max_ranks)
    text += fmt::format("# and {} more ranks, all of them in --json\n", ranks.size() - max_ranks);
  return text;
}

struct RateRow {
  std::string what, unit;
  double scale, one_core, one_rank, all_ranks;
};

const Table<RateRow>& rate_table() {
  static const auto scaled = [](double rate, const RateRow& r) {
    return rate > 0 ? rate / r.scale : nan_of<double>;
  };
  static const Table<RateRow> table({
      {"rate", "", 14, 0, &RateRow::what, Align::left},
      {"unit", "", 8, 0, &RateRow::unit, Align::left},
      {"one_core", "", 10, 1, [](const RateRow& r) { return scaled(r.one_core, r); }},
      {"one_rank", "", 10, 1, [](const RateRow& r) { return scaled(r.one_rank, r); }},
      {"all_ranks_of_host", "", 18, 1, [](const RateRow& r) { return scaled(r.all_ranks, r); }},
  });
  return table;
}

struct MessageRow {
  int64_t bytes;
  const MeasuredLink *inside, *between, *all;
  size_t index;
  double microseconds(const MeasuredLink* link) const {
    return link == nullptr ? nan_of<double> : 1e6 * link->messages[index].seconds.value;
  }
  double rate(const MeasuredLink* link) const { return bytes / microseconds(link) / 1e3; }
};

const Table<MessageRow>& message_table() {
  using Row = MessageRow;
  static const Table<Row> table({
      {"message", "bytes", 10, 0, &Row::bytes},
      {"inside_host", "us", 12, 2, [](const Row& r) { return r.microseconds(r.inside); }},
      {"rate", "GB/s", 8, 2, [](const Row& r) { return r.rate(r.inside); }},
      {"between_hosts", "us", 14, 2, [](const Row& r) { return r.microseconds(r.between); }},
      {"rate", "GB/s", 8, 2, [](const Row& r) { return r.rate(r.between); }},
      {"all_at_once", "us", 12, 2, [](const Row& r) { return r.microseconds(r.all); }},
      {"rate", "GB/s", 8, 2, [](const Row& r) { return r.rate(r.all); }},
  });
  return table;
}

std::string messages_text(const MeasuredMessages& messages) {
  const auto pointer = [](const auto& link) { return link ? &*link : nullptr; };
  if (!messages.all_at_once) return "# messages: none, there is one rank\n";
  std::vector<MessageRow> rows;
  for (size_t i = 0; i < messages.all_at_once->messages.size(); ++i)
    rows.push_back({messages.all_at_once->messages[i].bytes, pointer(messages.inside_host),
                    pointer(messages.between_hosts), pointer(messages.all_at_once), i});
  return message_table().text(rows);
}

}  // namespace

std::string identity_text(const RunReport& report) {
  const MachineIdentity& machine = report.machine.identity;
  std::string text;
  for (const auto& kind : kinds_of_hosts(machine.hosts)) text += host_text(kind);
  const MpiIdentity& mpi = machine.mpi;
  text += "MPI\n";
  text += line("library", fmt::format("{}, device {}, over {}", mpi.library, known(mpi.device),
                                      known(mpi.transport)));
  text += line("inside a host", route_text(mpi.inside_host));
  text += line("between hosts", route_text(mpi.between_hosts));
  const SlurmIdentity& slurm = machine.slurm;
  text +=
      line("Slurm", slurm.job.empty() ? std::string("none")
                                      : fmt::format("job {}, cluster {}, partition {}, nodes {}",
                                                    slurm.job, known(slurm.cluster),
                                                    known(slurm.partition), known(slurm.nodes)));
  return text + rank_table(report);
}

std::string capabilities_text() {
  std::string text = "build\n";
  for (const auto& [sort, names] : capabilities()) {
    std::string label = sort;
    std::ranges::replace(label, '_', ' ');
    text += line(label, names.empty() ? "none" : fmt::format("{}", fmt::join(names, " ")));
  }
  return text;
}

std::string measured_text(const MeasuredMachine& measured, const std::string& crowd) {
  const MeasuredRates& rates = measured.rates;
  const auto row = [&](const char* what, Sampled WorkRates::*rate) {
    return RateRow{.what = what,
                   .unit = "GB/s",
                   .scale = 1e9,
                   .one_core = nan_of<double>,
                   .one_rank = (rates.one_rank.*rate).value,
                   .all_ranks = (rates.all_ranks.*rate).value};
  };
  RateRow fma = row("f32 FMA", &WorkRates::fma);
  fma.unit = "GFLOP/s";
  fma.one_core = rates.one_core_fma.value;
  std::string text =
      fmt::format("# measured: {} of {}, {} a host at most, arrays of {}\n",
                  count_text(measured.ranks, "rank"), count_text(measured.threads, "thread"),
                  measured.ranks_of_a_host, binary_size(rates.array_bytes));
  text += rate_table().text({fma, row("memory read", &WorkRates::read),
                             row("memory update", &WorkRates::update),
                             row("memory copy", &WorkRates::copy)});
  text += messages_text(measured.messages);
  if (measured.gpu)
    text += fmt::format("# a GPU's memory, arrays of {}, all ranks at once: fill {}, copy {}\n",
                        binary_size(measured.gpu->array_bytes), si_text(measured.gpu->fill, "B/s"),
                        si_text(measured.gpu->copy, "B/s"));
  constexpr double quiet = 0.05;
  if (measured.cores_used_by_others > quiet)
    text += fmt::format(
        "# note: other processes used {:.2f} cores of a host meanwhile; "
        "these are figures of a busy machine\n",
        measured.cores_used_by_others);
  if (!crowd.empty())
    text += fmt::format("# note: {}: ranks shared cores, and messages waited for them\n", crowd);
  return text;
}

std::string model_name(const MachineIdentity& machine, int ranks) {
  const HostIdentity& host = machine.hosts.front();
  const std::string& device = host.gpus.empty() ? host.cpu : host.gpus.front();
  return fmt::format("{} ranks on {} x {}", ranks, machine.hosts.size(),
                     device.empty() ? "an unknown processor" : device);
}

std::string machine_document(const RunReport& report,
                             const std::optional<MeasuredMachine>& measured,
                             const std::optional<MachineModel>& model, const std::string& end) {
  const Json run = parse_json("the report", json_text(report, end), "JSON");
  Json document = {{"schema", machine_schema}};
  for (const char* key : {"suite", "build", "run", "ranks", "libraries", "environment"})
    document[key] = run.at(key);
  Json can = Json::object();
  for (const auto& [sort, names] : capabilities()) can[sort] = names;
  document["capabilities"] = std::move(can);
  document.update(json_of(report.machine.identity));
  document["measured"] = measured ? json_of(*measured, true) : Json();
  if (model) document["model"] = model_json(*model, "measured by gyre-info --model on " + end);
  return dump_json(document, 2) + "\n";
}

}  // namespace gyre
