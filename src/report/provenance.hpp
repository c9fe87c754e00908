#pragma once
// Where a file that an app writes comes from.

#include "io/schema.hpp"
#include "report/app.hpp"

namespace gyre {

/// generator (program, version, git), command, and `sources`: what went in.
Provenance provenance_of(const AppContext& context, const std::string& sources);

}  // namespace gyre
