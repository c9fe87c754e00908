#pragma once
// Small Linux files that describe a machine's configuration.

#include <cstdint>
#include <string>
#include <vector>

namespace gyre {

/// Whole file without trailing blanks; "" if it cannot be read.
std::string read_small_file(const std::string& path);

/// The value of the first line "NAME: VALUE" or "NAME=VALUE", without quotes; "" without one.
std::string value_in(const std::string& text, const std::string& name);

/// "madvise" for "always [madvise] never"; "" without brackets.
std::string chosen_in(const std::string& text);

/// Distinct texts in order, joined by "+"; empty ones are omitted.
std::string joined_kinds(const std::vector<std::string>& texts);

}  // namespace gyre
