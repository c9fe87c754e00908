#include "report/command_line.hpp"

#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iterator>
#include <memory>
#include <sstream>

#include "core/error.hpp"
#include "io/resources.hpp"
#include "report/help_text.hpp"
#include "report/options.hpp"
#include "report/toml_file.hpp"

namespace gyre {
namespace {

/// The complaint about the value `text` of the switch `name`, or "".
std::string complain_about_switch(const std::string& name, const std::string& text) {
  static const std::vector<std::string> words = {"true", "false", "on", "off",
                                                 "yes",  "no",    "1",  "0"};
  const std::string lower = CLI::detail::to_lower(text);
  if (std::find(words.begin(), words.end(), lower) != words.end()) return "";
  const std::string near = nearest(lower, words);
  return fmt::format("{} is a switch: true or false, not '{}'{}", name, text,
                     near.empty() ? "" : "; nearest: " + near);
}

/// Reads TOML with toml++ for an app. Values on the command line win.
class ConfigFile : public CLI::ConfigTOML {
 public:
  explicit ConfigFile(OptionTable& table) : table_(table), app_(table.parser()) {}

  /// Sets the app's options and returns an empty list. Throws CLI::ConfigError, which lists all
  /// errors by file, line, key and value: invalid TOML, sections, keys without an option, values of
  /// a wrong type and values that the option refuses.
  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override;

 private:
  OptionTable& table_;
  CLI::App& app_;
};

std::string text_of(const toml::node& node) {
  std::ostringstream text;
  node.visit([&](const auto& value) { text << value; });
  return text.str();
}

/// A value as a command-line argument; nullopt if its type is not that of a single value.
std::optional<std::string> argument_of(const toml::node& node) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return fmt::format("{}", number->get());
  if (const auto* number = node.as_floating_point()) return fmt::format("{}", number->get());
  if (const auto* value = node.as_boolean()) return std::string(value->get() ? "true" : "false");
  return std::nullopt;
}

const char* type_of(const toml::node& node) {
  if (node.is_array()) return "an array";
  if (node.is_table()) return "a table";
  if (node.is_boolean()) return "a truth value";
  return "a date or time";
}

bool is_switch(const CLI::Option& option) {
  return option.get_items_expected_max() == 0;
}

/// The keys that a configuration file may have: names of options without dashes.
std::vector<std::string> keys_of(const CLI::App& app) {
  std::vector<std::string> keys;
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_configurable()) continue;
    for (const std::string& name : option->get_lnames()) keys.push_back(name);
    for (const std::string& name : option->get_snames()) keys.push_back(name);
    if (option->get_positional()) keys.push_back(option->get_name(true));
  }
  return keys;
}

CLI::Option* find_option(CLI::App& app, const std::string& key) {
  for (const std::string& name : {"--" + key, "-" + key, key})
    if (CLI::Option* option = app.get_option_no_throw(name);
        option != nullptr && option->get_configurable())
      return option;
  return nullptr;
}

/// The values of a key as arguments. `complaint`: why they cannot be arguments, or "".
std::vector<std::string> arguments_of(const CLI::Option& option, const std::string& key,
                                      const toml::node& node, std::string& complaint) {
  const auto several = [&] { return option.get_items_expected_max() > 1; };
  const auto one = [&](const toml::node& value) -> std::string {
    const std::optional<std::string> text = argument_of(value);
    if (text && is_switch(option)) {
      complaint = complain_about_switch("--" + key, *text);
      return complaint.empty() ? option.get_flag_value(key, *text) : "";
    }
    if (text && !value.is_boolean()) return *text;
    const std::string wanted =
        is_switch(option)
            ? std::string("true or false")
            : fmt::format("{}{}", several() ? "values, each " : "one ", option.get_type_name());
    complaint = fmt::format("{} where --{} takes {}", type_of(value), key, wanted);
    return "";
  };
  std::vector<std::string> arguments;
  if (const toml::array* values = node.as_array(); values != nullptr && several()) {
    for (const toml::node& value : *values)
      if (complaint.empty()) arguments.push_back(one(value));
    if (values->empty()) complaint = "an empty array is no value; leave the key out instead";
  } else {
    arguments.push_back(one(node));
  }
  return arguments;
}

/// Sets an option to the value of its key unless the command line has set it. Returns the
/// complaint, or "".
std::string apply(CLI::Option& option, const std::string& key, const toml::node& node) {
  std::string complaint;
  const std::vector<std::string> arguments = arguments_of(option, key, node, complaint);
  if (!complaint.empty() || !option.empty()) return complaint;
  try {
    option.add_result(arguments);
    option.run_callback();
    return "";
  } catch (const CLI::ParseError& error) {
    option.clear();
    const std::string text = error.what(), name = option.get_name() + ": ";
    return text.rfind(name, 0) == 0 ? text.substr(name.size()) : text;
  }
}

/// Returns what is wrong with a key and its value; "" if nothing is.
std::string complaint_about(CLI::App& app, const std::string& key, const toml::node& node) {
  CLI::Option* const option = find_option(app, key);
  if (option == nullptr && (node.is_table() || node.is_array_of_tables()))
    return fmt::format("unknown section [{}]: there are no sections, and keys are names of options",
                       key);
  const std::string given = fmt::format("{} = {}", key, text_of(node));
  if (option == nullptr) {
    const std::string near = nearest(key, keys_of(app));
    return fmt::format("unknown key {}{}", given, near.empty() ? "" : "; nearest: " + near);
  }
  const std::string complaint = apply(*option, key, node);
  return complaint.empty() ? "" : fmt::format("{}: {}", given, complaint);
}

std::vector<CLI::ConfigItem> ConfigFile::from_config(std::istream& input) const {
  const auto file = app_.get_config_ptr()->as<std::string>();
  std::vector<std::pair<toml::source_index, std::string>> complaints;  // line and text
  const std::string toml(std::istreambuf_iterator<char>(input), {});
  if (const int deep = line_of_deep_key(toml); deep > 0)
    throw CLI::ConfigError(fmt::format("{}:{}: a key of too many parts", file, deep),
                           CLI::ExitCodes::ConfigError);
  try {
    const toml::table keys = toml::parse(toml);
    table_.keep_complaints(false);  // they get the line of their key
    for (const auto& [key, node] : keys) {
      const std::string complaint = complaint_about(app_, std::string(key.str()), node);
      if (!complaint.empty()) complaints.emplace_back(key.source().begin.line, complaint);
    }
  } catch (const toml::parse_error& error) {
    complaints.emplace_back(error.source().begin.line,
                            fmt::format("this is no TOML: {}", error.description()));
  }
  table_.keep_complaints(true);
  if (complaints.empty()) return {};
  std::sort(complaints.begin(), complaints.end());
  std::vector<std::string> lines;
  for (const auto& [line, text] : complaints)
    lines.push_back(fmt::format("{}:{}: {}", file, line, text));
  throw CLI::ConfigError(fmt::format("{}", fmt::join(lines, "\n  ")), CLI::ExitCodes::ConfigError);
}

/// The complaint about a file that is unreadable, not regular (a pipe would block) or too large.
std::string complain_about_unreadable(const std::string& path) {
  try {
    read_text_file(path, "options in TOML");
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

/// Complaints about invalid values of flags (--flag=VALUE). CLI11 accepts any number, and throws
/// std::out_of_range for one beyond 64 bits.
std::vector<std::string> describe_switches(const CLI::App& app, int argc, const char* const* argv) {
  std::vector<std::string> complaints;
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    if (argument.rfind("--", 0) != 0 || equals == std::string::npos) continue;
    const std::string name = argument.substr(0, equals);
    const CLI::Option* option = app.get_option_no_throw(name);
    if (option == nullptr || option->get_items_expected_max() != 0) continue;
    const std::string complaint = complain_about_switch(name, argument.substr(equals + 1));
    if (!complaint.empty()) complaints.push_back(complaint);
  }
  return complaints;
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

/// One line for each argument that no option has taken.
std::vector<std::string> describe_leftovers(const CLI::App& app) {
  const std::vector<std::string> names = option_names(app);
  std::vector<std::string> options, others;
  for (const std::string& argument : app.remaining()) {
    const std::string name = argument.substr(0, argument.find('='));
    const bool dashed = name.size() > 1 && name[0] == '-';
    const std::string near = nearest(dashed ? name : "--" + name, names);
    const std::string hint = near.empty() ? "" : fmt::format("; nearest: {}", near);
    if (dashed)
      options.push_back(fmt::format("unknown option {}{}", name, hint));
    else
      others.push_back(fmt::format("unexpected argument {}{}", name, hint));
  }
  // The value of an unknown option is an unexpected argument as well: report only the cause.
  return options.empty() ? others : options;
}

/// Errors of options that are given beside the file that has their values.
std::vector<std::string> describe_given_twice(const OptionTable& table) {
  std::vector<std::string> errors;
  const auto file = std::ranges::find_if(table.all(), [](const Option& option) {
    return option.is_problem_file && option.is_given();
  });
  for (const Option& option : table.all())
    if (file != table.all().end() && option.is_in_problem_file && option.is_given())
      errors.push_back(
          fmt::format("{} is that of the file of {}: leave it out", option.flag, file->flag));
  return errors;
}

}  // namespace

void declare_common(OptionTable& table, CommonOptions& common) {
  CLI::App& app = table.parser();
  const AddOptions add(table, "Common");
  CLI::Option* config =
      app.set_config("--config", "", "Read options from this TOML file; the command line wins")
          ->type_name("FILE")
          ->check(complain_about_empty)
          ->check(complain_about_unreadable);
  config->group("Common");
  const auto path = [config] {  // CLI11 2.4 reads past the end of the values if there are none
    return config->count() == 0 ? std::string() : config->as<std::string>();
  };
  table.add({"--config", "config", ToldBy::nothing, path, ""}).reads_file();
  add(timeout_option, "End the run when one wait lasts longer, in seconds; 0: never",
      common.timeout_seconds, not_negative);
  add.choice(
      "--progress",
      "Progress of runs above 5 s, on stderr: auto redraws a line on a terminal, its own or the "
      "launcher's, and writes one every 10 s elsewhere; on: stderr ends at a terminal",
      common.progress, {"auto", "on", "off"});
  add.flag("-v,--verbose", "Say more", common.verbose);
  add.flag("-q,--quiet", "Say less", common.quiet);
  app.get_option("--quiet")->excludes(app.get_option("--verbose"));
  app.set_version_flag("--version", std::string("unused"), "Print version and build, and exit")
      ->configurable(false)
      ->group("Common");
  app.set_help_flag("-h,--help", "Print this help, and exit")->group("Common");
  app.formatter(help_formatter());
  app.config_formatter(std::make_shared<ConfigFile>(table));
  // Unknown arguments are collected, so that one error names them all, each with a suggestion.
  app.allow_extras();
}

Request parse_command_line(OptionTable& table, int argc, const char* const* argv) {
  CLI::App& app = table.parser();
  std::vector<std::string> errors = describe_switches(app, argc, argv);
  std::string complaint;
  table.keep_complaints(true);
  try {
    if (errors.empty()) app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return Request::help;
  } catch (const CLI::CallForVersion&) {
    return Request::version;
  } catch (const CLI::ParseError& error) {
    complaint = error.what();
  }
  for (std::string& leftover : describe_leftovers(app)) errors.push_back(std::move(leftover));
  for (const std::string& refused : table.complaints()) errors.push_back(refused);
  if (!complaint.empty()) errors.push_back(complaint);
  for (std::string& twice : describe_given_twice(table)) errors.push_back(std::move(twice));
  if (errors.empty()) return Request::run;
  errors.push_back(fmt::format("see {} --help", app.get_name()));
  throw Error(ExitCode::usage, fmt::format("{}", fmt::join(errors, "\n  ")));
}

}  // namespace gyre
