#pragma once
// The layouts as an option of an app.

#include <string>

namespace gyre {

/// A line for each layout.
std::string layout_help();

}  // namespace gyre
