#pragma once
// Provenance of a file that an app writes.

#include "io/schema.hpp"
#include "report/app.hpp"

namespace gyre {

/// generator (program, version, git), command, and `sources` (the inputs).
Provenance provenance_of(const AppContext& context, const std::string& sources);

}  // namespace gyre
