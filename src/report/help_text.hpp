#pragma once
// The layout of --help.

#include <CLI/CLI.hpp>
#include <memory>

namespace gyre {

/// Prints groups of options in the order of option_groups, in lines of at most 100 columns. A list
/// of choices continues in the next line after a '|'.
std::shared_ptr<CLI::FormatterBase> help_formatter();

}  // namespace gyre
