#pragma once
// A configuration file in TOML: its keys are the names of options, at the top level.
//
//     tokens = "128K"              what --tokens 128K says
//     check = "none"
//     in-place = false             a switch
//     files = ["a.h5", "b.h5"]     an option that takes several values

#include <CLI/CLI.hpp>

namespace gyre {

/// The complaint about what the switch `name` is given, or "".
std::string complain_about_switch(const std::string& name, const std::string& text);

/// Reads TOML by toml++ for an app. What the command line gives wins.
class ConfigFile : public CLI::ConfigTOML {
 public:
  explicit ConfigFile(CLI::App& app) : app_(app) {}

  /// Gives the options of the app their values and returns nothing. Throws CLI::ConfigError, which
  /// lists everything that is wrong by file, line, key and value: what is no TOML, sections, keys
  /// that no option has, values of a wrong type or that the option refuses.
  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override;

 private:
  CLI::App& app_;
};

}  // namespace gyre
