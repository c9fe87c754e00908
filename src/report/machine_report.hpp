#pragma once
// The machine in a report: its header line, its part of the JSON file, and --machine.

#include <memory>
#include <string>

#include "core/json.hpp"
#include "machine/identity.hpp"
#include "machine/json.hpp"

namespace gyre {

struct AppContext;
class OptionTable;

/// The machine of a run.
struct MachineReport {
  MachineIdentity identity;
  std::shared_ptr<const MachineFile> file;  ///< from --machine; null without it
};

/// Adds --machine, whose value is stored in `path`.
void declare_machine_option(OptionTable& table, std::string& path);

/// The bytes of a machine file. Throws a usage error if `path` is not a file or is too large.
std::string read_machine_text(const std::string& path);

/// Reads a gyre-machine/1 file; null for an empty path. All ranks throw the same usage error if it
/// cannot be read or is invalid. Collective.
std::shared_ptr<const MachineFile> read_machine_file(Communicator& world, const std::string& path);

/// Finds the machine of the run. Throws a usage error when --machine was measured on another kind
/// of machine. Collective.
MachineReport describe_machine(const AppContext& context);

/// "# machine AMD EPYC, 1 socket, 2 cores, 1 NUMA node, 24 GiB, governor n/a": describes the most
/// frequent kind of host in at most 120 columns; "" for an empty report.
std::string machine_text(const MachineReport& machine);

/// {"hosts": ..., "mpi": ..., "slurm": ..., "measured": {"file": ..., "sha256": ..., ...}}; without
/// "measured" if there is no file; null for an empty report.
Json machine_json(const MachineReport& machine);

/// Adds "cpus" and "numa" to `entry`, the JSON object of a rank.
void add_placement(Json& entry, const MachineReport& machine, int rank);

}  // namespace gyre
