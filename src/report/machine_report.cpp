#include "report/machine_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "comm/agree.hpp"
#include "io/resources.hpp"
#include "io/trust/sha256.hpp"
#include "report/app.hpp"
#include "report/options.hpp"
#include "report/value.hpp"

namespace gyre {
namespace {

constexpr size_t max_columns = 120;

Json text_or_null(const std::string& text) {
  return text.empty() ? Json() : Json(text);
}

}  // namespace

std::string read_machine_text(const std::string& path) {
  return read_text_file(path, machine_schema);
}

void declare_machine_option(OptionTable& table, std::string& path) {
  AddOptions(table, "Output")(
      "--machine", "Add measurements of this machine to the result (gyre-machine/1)", path)
      .reads_file();
}

std::shared_ptr<const MachineFile> read_machine_file(Communicator& world, const std::string& path) {
  if (path.empty()) return nullptr;
  std::string text;
  run_on_root(world, "--machine", [&] { text = read_machine_text(path); });
  text = broadcast_string(world, text, 0);
  auto file = std::make_shared<MachineFile>();
  run_agreed(world, "--machine", [&] {
    *file = parse_machine_file(path, text);
    Sha256 sha256;
    sha256.add(text.data(), text.size());
    file->sha256 = sha256.hex();
  });
  return file;
}

MachineReport describe_machine(const AppContext& context) {
  MachineReport machine{find_machine(context.world), context.machine};
  run_agreed(context.world, "--machine", [&] {
    if (machine.file) require_same_kind(*machine.file, machine.identity);
  });
  return machine;
}

std::string machine_text(const MachineReport& machine) {
  if (machine.identity.hosts.empty()) return "";
  const auto kinds = kinds_of_hosts(machine.identity.hosts);
  const auto& kind = *std::ranges::max_element(kinds, {}, [](const auto& k) { return k.size(); });
  const HostIdentity& host = *kind.front();
  const double gib = std::round(host.memory_bytes / 0x1p30);
  std::string rest =
      fmt::format(", {}, {}, {}, {:.0f} GiB, governor {}", count_text(host.sockets, "socket"),
                  count_text(host.cores, "core"), count_text(std::ssize(host.numa), "NUMA node"),
                  gib, host.governor.empty() ? "n/a" : host.governor);
  if (!host.gpus.empty()) rest += fmt::format(", {} x {}", host.gpus.size(), host.gpus.front());
  if (const size_t others = machine.identity.hosts.size() - kind.size(); others > 0)
    rest += fmt::format("; {}", count_text(others, "other host"));
  const std::string begin =
      kind.size() > 1 ? fmt::format("# machine {} x ", kind.size()) : std::string("# machine ");
  std::string cpu = host.cpu.empty() ? "unknown processor" : host.cpu;
  const size_t room = max_columns - std::min(max_columns - 16, begin.size() + rest.size());
  if (cpu.size() > room) cpu = cpu.substr(0, room - 3) + "...";
  std::string line = begin + cpu + rest;
  if (line.size() > max_columns) line = line.substr(0, max_columns - 3) + "...";
  return line + "\n";
}

Json machine_json(const MachineReport& machine) {
  if (machine.identity.hosts.empty()) return nullptr;
  Json json = json_of(machine.identity);
  if (!machine.file) return json;
  const std::string& path = machine.file->path;
  json["measured"] = {{"file", path.substr(path.rfind('/') + 1)}, {"sha256", machine.file->sha256}};
  json["measured"].update(json_of(machine.file->measured, false));
  return json;
}

void add_placement(Json& entry, const MachineReport& machine, int rank) {
  for (const RankPlacement& placement : machine.identity.ranks) {
    if (placement.rank != rank) continue;
    entry["cpus"] = text_or_null(placement.cpus);
    entry["numa"] = text_or_null(placement.numa);
    return;
  }
}

}  // namespace gyre
