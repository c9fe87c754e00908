#pragma once
// Small files of Linux that say how a machine is set up.

#include <cstdint>
#include <string>
#include <vector>

namespace gyre {

/// Whole, without blanks at the end; "" when it cannot be read.
std::string read_small_file(const std::string& path);

/// The value of the first line "NAME: VALUE" or "NAME=VALUE", without quotes; "" without one.
std::string value_in(const std::string& text, const std::string& name);

/// "madvise" of "always [madvise] never"; "" without brackets.
std::string chosen_in(const std::string& text);

/// What differs among texts, in their order, joined by "+"; empty ones are left out.
std::string joined_kinds(const std::vector<std::string>& texts);

}  // namespace gyre
