#include "report/option_table.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <stdexcept>
#include <utility>

namespace gyre {

Option& Option::told(ToldBy by) {
  told_by = by;
  return *this;
}

Option& Option::show(Shown when) {
  shown = when;
  return *this;
}

Option& Option::called(const std::string& other) {
  name = other;
  return *this;
}

Option& Option::empty_is(const std::string& text) {
  return records([read = value, text] {
    const Value now = read();
    return now == Value("") ? Value(text) : now;
  });
}

Option& Option::records(const std::function<Value()>& f) {
  value = f;
  usual = f();
  return *this;
}

Option& Option::reads_file() {
  reads = [read = value] { return std::vector{std::get<std::string>(read())}; };
  return told_by == ToldBy::nothing ? *this : told(ToldBy::input);
}

Option& Option::reads_files(const std::vector<std::string>& values) {
  reads = [&values] { return values; };
  return told(ToldBy::input);
}

Option& Option::names_file(const std::function<std::string(const std::string&)>& path_of) {
  reads = [read = value, path_of] {
    const std::string text = std::get<std::string>(read());
    return std::vector{text.empty() ? text : path_of(text)};
  };
  return *this;
}

Option& Option::writes_file() {
  writes = [read = value] { return std::get<std::string>(read()); };
  is_text = [] { return false; };
  return same_results();
}

Option& Option::writes_text() {
  Option& option = writes_file();
  is_text = [] { return true; };
  return option;
}

OptionTable::OptionTable(const std::string& description, const std::string& program)
    : parser_(std::make_unique<CLI::App>(description, program)) {}
OptionTable::~OptionTable() = default;

const Option& OptionTable::at(std::string_view flag) const {
  const auto found = std::ranges::find(options_, flag, &Option::flag);
  if (found == options_.end()) throw std::logic_error(fmt::format("no option {}", flag));
  return *found;
}

Option& OptionTable::add(Option option) {
  return options_.emplace_back(std::move(option));
}

Fields OptionTable::configuration(const Fields& facts) const {
  Fields fields = facts;
  for (const Option& option : options_) {
    if (option.told_by != ToldBy::configuration) continue;
    const auto fact = std::ranges::find(fields, option.name, &Fields::value_type::first);
    if (fact == fields.end())
      fields.emplace_back(option.name, option.value());
    else if (option.is_given())
      fact->second = option.value();
  }
  return fields;
}

std::vector<std::string> OptionTable::not_shown(const Fields& facts) const {
  std::vector<std::string> names;
  const Value blanks[] = {false, int64_t{0}, 0.0, "", "none"};
  for (const Option& option : options_) {
    const bool is_fact = std::ranges::count(facts, option.name, &Fields::value_type::first) > 0;
    const bool is_shown = option.shown != Shown::never &&
                          (option.is_given() || (option.shown == Shown::usually &&
                                                 std::ranges::count(blanks, option.value()) == 0));
    if (!is_fact && !is_shown) names.push_back(option.name);
  }
  return names;
}

RunFiles OptionTable::files() const {
  RunFiles files;
  for (const Option& option : options_) {
    if (option.reads)
      for (const std::string& path : option.reads()) files.inputs.push_back({option.flag, path});
    if (!option.writes) continue;
    (option.is_text() ? files.texts : files.outputs).push_back({option.flag, option.writes()});
  }
  return files;
}

std::vector<std::string> OptionTable::inputs() const {
  std::vector<std::string> paths;
  for (const Option& option : options_) {
    if (!option.reads || option.told_by == ToldBy::nothing) continue;
    for (const std::string& path : option.reads())
      if (!path.empty()) paths.push_back(path);
  }
  return paths;
}

}  // namespace gyre
