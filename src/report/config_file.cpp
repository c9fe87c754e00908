#include "report/config_file.hpp"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <iterator>
#include <sstream>

#include "report/options.hpp"
#include "report/toml_file.hpp"

namespace gyre {
namespace {

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

/// Names of the options in a file: without dashes.
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

/// What is wrong with a key and its value, or "".
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

}  // namespace

std::string complain_about_switch(const std::string& name, const std::string& text) {
  static const std::vector<std::string> words = {"true", "false", "on", "off",
                                                 "yes",  "no",    "1",  "0"};
  const std::string lower = CLI::detail::to_lower(text);
  if (std::find(words.begin(), words.end(), lower) != words.end()) return "";
  const std::string near = nearest(lower, words);
  return fmt::format("{} is a switch: true or false, not '{}'{}", name, text,
                     near.empty() ? "" : "; nearest: " + near);
}

std::vector<CLI::ConfigItem> ConfigFile::from_config(std::istream& input) const {
  const auto file = app_.get_config_ptr()->as<std::string>();
  std::vector<std::pair<toml::source_index, std::string>> complaints;  // line and text
  const std::string toml(std::istreambuf_iterator<char>(input), {});
  if (const int deep = line_of_deep_key(toml); deep > 0)
    throw CLI::ConfigError(fmt::format("{}:{}: a key of too many parts", file, deep),
                           CLI::ExitCodes::ConfigError);
  try {
    const toml::table table = toml::parse(toml);
    for (const auto& [key, node] : table) {
      const std::string complaint = complaint_about(app_, std::string(key.str()), node);
      if (!complaint.empty()) complaints.emplace_back(key.source().begin.line, complaint);
    }
  } catch (const toml::parse_error& error) {
    complaints.emplace_back(error.source().begin.line,
                            fmt::format("this is no TOML: {}", error.description()));
  }
  if (complaints.empty()) return {};
  std::sort(complaints.begin(), complaints.end());
  std::vector<std::string> lines;
  for (const auto& [line, text] : complaints)
    lines.push_back(fmt::format("{}:{}: {}", file, line, text));
  throw CLI::ConfigError(fmt::format("{}", fmt::join(lines, "\n  ")), CLI::ExitCodes::ConfigError);
}

}  // namespace gyre
