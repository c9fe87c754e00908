#pragma once
// JSON of a machine: the parts of gyre-machine/1.

#include <string>

#include "core/json.hpp"
#include "machine/identity.hpp"
#include "machine/measured.hpp"

namespace gyre {

inline constexpr const char* machine_schema = "gyre-machine/1";

/// {"hosts": [...], "mpi": {...}, "slurm": {...} or null}. Hosts of one kind (kinds_of_hosts) are
/// one entry, with all their names in "names".
Json json_of(const MachineIdentity& machine);

/// Without `with_samples`, omits the samples and the descriptions of the methods ("how").
Json json_of(const MeasuredMachine& measured, bool with_samples);

/// Properties of a kind of host that are compared.
struct HostKind {
  std::string cpu;
  int sockets = 0, cores = 0;
  bool operator==(const HostKind&) const = default;
};

/// Contents of a gyre-machine/1 file.
struct MachineFile {
  std::string path;    ///< with its folder, without which results name it
  std::string sha256;  ///< SHA-256 of the file's bytes
  std::vector<HostKind> hosts;
  MeasuredMachine measured;
};

/// Parses the bytes of a file. Throws a usage error that names file, place and value for invalid
/// JSON, another schema, a missing or wrong field, or missing measurements.
MachineFile parse_machine_file(const std::string& path, const std::string& text);

/// Throws a usage error if a host of the run is of a kind that the file does not have.
void require_same_kind(const MachineFile& file, const MachineIdentity& machine);

}  // namespace gyre
