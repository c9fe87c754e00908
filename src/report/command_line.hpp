#pragma once
// Parsing of the command line and the configuration file, common to all programs.

#include <string>

#include "report/option_table.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {

struct CommonOptions {
  double timeout_seconds = default_timeout_seconds;
  std::string progress = "auto";
  bool verbose = false;
  bool quiet = false;
};

/// The request of a valid command line.
enum class Request { run, help, version };

/// Adds the common options. Must be called after the app's own are added, which --help shows first.
void declare_common(OptionTable& table, CommonOptions& common);

/// Parses the options. Throws a usage error that lists all errors.
Request parse_command_line(OptionTable& table, int argc, const char* const* argv);

}  // namespace gyre
