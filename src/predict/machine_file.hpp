#pragma once
// A machine to predict for, as a file of gyre-machine/1: its object `model`
// (inputs/machines/README.md says what is in it).

#include <string>

#include "core/json.hpp"
#include "predict/machine.hpp"

namespace gyre {

/// Parses the bytes of a file, TOML or JSON by the end of its name. A usage error names file, key
/// and value of what is not known, missing, of another kind or impossible, with the nearest key.
MachineModel parse_machine_model(const std::string& path, const std::string& text);

/// What parse_machine_model reads; each figure with this source.
Json model_json(const MachineModel& machine, const std::string& source);

}  // namespace gyre
