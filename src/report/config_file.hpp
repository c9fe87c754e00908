#pragma once
// A configuration file in TOML: its keys are the names of options, at the top level.
//
//     tokens = "128K"              what --tokens 128K says
//     check = "none"
//     in-place = false             a switch
//     files = ["a.h5", "b.h5"]     an option that takes several values

#include <CLI/CLI.hpp>

namespace gyre {

/// The complaint about the value `text` of the switch `name`, or "".
std::string complain_about_switch(const std::string& name, const std::string& text);

/// Reads TOML with toml++ for an app. Values on the command line win.
class ConfigFile : public CLI::ConfigTOML {
 public:
  explicit ConfigFile(CLI::App& app) : app_(app) {}

  /// Sets the app's options and returns an empty list. Throws CLI::ConfigError, which lists all
  /// errors by file, line, key and value: invalid TOML, sections, keys without an option, values of
  /// a wrong type and values that the option refuses.
  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override;

 private:
  CLI::App& app_;
};

}  // namespace gyre
