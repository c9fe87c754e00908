#pragma once
// Output of gyre-info: text and documents.

#include <optional>
#include <string>

#include "machine/measured.hpp"
#include "predict/machine.hpp"
#include "report/result.hpp"

namespace gyre {

/// Lines for hosts, MPI, Slurm and ranks.
std::string identity_text(const RunReport& report);

/// Lines for the capabilities of the build.
std::string capabilities_text();

/// Tables of rates and messages. `crowd`: the text of crowding(), or "".
std::string measured_text(const MeasuredMachine& measured, const std::string& crowd);

/// "2 ranks on 1 x AMD EPYC": the name of a measured model.
std::string model_name(const MachineIdentity& machine, int ranks);

/// The document gyre-machine/1. "measured" is null without measurements; "model" exists only with
/// --model. `end`: UTC, ISO 8601.
std::string machine_document(const RunReport& report,
                             const std::optional<MeasuredMachine>& measured,
                             const std::optional<MachineModel>& model, const std::string& end);

}  // namespace gyre
