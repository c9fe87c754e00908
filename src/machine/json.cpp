#include "machine/json.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "machine/json_fields.hpp"

namespace gyre {
namespace {

using detail::FieldReader;
using detail::FieldWriter;

Json hosts_json(const std::vector<HostIdentity>& hosts) {
  Json list = Json::array();
  for (const std::vector<const HostIdentity*>& kind : kinds_of_hosts(hosts)) {
    Json names = Json::array();
    for (const HostIdentity* host : kind) names.push_back(host->host);
    Json& entry = list.emplace_back(Json{{"names", std::move(names)}});
    entry.update(FieldWriter()(*kind.front()));
    entry.erase("host");
  }
  return list;
}

std::string file_name(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

}  // namespace

const Json& FieldReader::get(const Json& json, const std::string& place,
                             const std::string& name) const {
  require(json.is_object(), json, place, "an object with '" + name + "'");
  if (const auto found = json.find(name); found != json.end()) return *found;
  std::vector<std::string> names;
  for (const auto& [key, value] : json.items()) names.push_back(key);
  const std::string near = nearest(name, names);
  throw_usage("{}: {} has no '{}'{}", file_, place.empty() ? "the file" : place, name,
              near.empty() ? "" : "; nearest: '" + near + "'");
}

void FieldReader::require(bool good, const Json& json, const std::string& place,
                          const std::string& wanted) const {
  if (good) return;
  throw_usage("{}: {} is {}; wanted: {}", file_, place.empty() ? "the file" : place,
              shown_json(json), wanted);
}

Json json_of(const MachineIdentity& machine) {
  const FieldWriter write;
  return {{"hosts", hosts_json(machine.hosts)},
          {"mpi", write(machine.mpi)},
          {"slurm", machine.slurm.job.empty() ? Json() : write(machine.slurm)}};
}

Json json_of(const MeasuredMachine& measured, bool with_samples) {
  return FieldWriter{with_samples}(measured);
}

MachineFile parse_machine_file(const std::string& path, const std::string& text) {
  const FieldReader read(path);
  const Json document = parse_json(
      path, text, fmt::format("JSON, {}, as gyre-info --json writes it", machine_schema));
  const Json& schema = read.get(document, "", "schema");
  read.require(schema == machine_schema, schema, "schema", fmt::format("\"{}\"", machine_schema));
  MachineFile file;
  file.path = path;
  const Json& hosts = read.get(document, "", "hosts");
  read.require(hosts.is_array() && !hosts.empty(), hosts, "hosts", "a list of at least one");
  for (size_t i = 0; i < hosts.size(); ++i) {
    const std::string place = fmt::format("hosts[{}]", i);
    HostKind& kind = file.hosts.emplace_back();
    read(read.get(hosts[i], place, "cpu"), place + ".cpu", kind.cpu);
    read(read.get(hosts[i], place, "sockets"), place + ".sockets", kind.sockets);
    read(read.get(hosts[i], place, "cores"), place + ".cores", kind.cores);
  }
  const Json& measured = read.get(document, "", "measured");
  read.require(!measured.is_null(), measured, "measured",
               "what gyre-info --json writes without --quick");
  read(measured, "measured", file.measured);
  return file;
}

void require_same_kind(const MachineFile& file, const MachineIdentity& machine) {
  for (const HostIdentity& host : machine.hosts) {
    const HostKind kind{host.cpu, host.sockets, host.cores};
    if (std::ranges::find(file.hosts, kind) != file.hosts.end()) continue;
    const HostKind& other = file.hosts.front();
    throw_usage(
        "--machine {}: hosts[0] is {} with {} sockets and {} cores, but host {} of this run is {} "
        "with {} and {}; measure this machine by gyre-info --json {}",
        file.path, other.cpu, other.sockets, other.cores, host.host, kind.cpu, kind.sockets,
        kind.cores, file_name(file.path));
  }
}

}  // namespace gyre
