#pragma once
// A machine model read from a file of schema gyre-machine/1: its object `model` (described in
// inputs/machines/README.md).

#include <string>

#include "core/json.hpp"
#include "predict/machine.hpp"

namespace gyre {

/// Parses a TOML or JSON file, as its extension says. Throws a usage error that names file, key and
/// value of what is unknown, missing, of the wrong type or impossible, with the nearest key.
MachineModel parse_machine_model(const std::string& path, const std::string& text);

/// Inverse of parse_machine_model; `source` says of every figure where it comes from.
Json model_json(const MachineModel& machine, const std::string& source);

}  // namespace gyre
