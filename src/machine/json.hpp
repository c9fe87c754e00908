#pragma once
// A machine as JSON: the parts of gyre-machine/1.

#include <string>

#include "core/json.hpp"
#include "machine/identity.hpp"
#include "machine/measured.hpp"

namespace gyre {

inline constexpr const char* machine_schema = "gyre-machine/1";

/// {"hosts": [...], "mpi": {...}, "slurm": {...} or null}. Hosts that differ in their names, and by
/// less than a hundredth in their memory, are one entry, whose "names" are theirs.
Json json_of(const MachineIdentity& machine);

/// With samples: all of it. Without: neither them nor how it was measured.
Json json_of(const MeasuredMachine& measured, bool with_samples);

/// A kind of host in a file, as far as it is compared.
struct HostKind {
  std::string cpu;
  int sockets = 0, cores = 0;
  bool operator==(const HostKind&) const = default;
};

/// What a file of gyre-machine/1 says.
struct MachineFile {
  std::string path;    ///< as given; shown without its folder
  std::string sha256;  ///< of its bytes
  std::vector<HostKind> hosts;
  MeasuredMachine measured;
};

/// Parses the bytes of a file. A usage error names file, place and value of what is not JSON, not
/// gyre-machine/1, missing or of another kind, and files without measurements.
MachineFile parse_machine_file(const std::string& path, const std::string& text);

/// Throws a usage error when a host of the run is of a kind that was not measured.
void require_same_kind(const MachineFile& file, const MachineIdentity& machine);

}  // namespace gyre
