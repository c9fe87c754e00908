// The CSV of a run. Every row has all independent variables, so that files can be concatenated.

#include <algorithm>
#include <cctype>
#include <vector>

#include "report/result.hpp"
#include "report/table.hpp"

namespace gyre {
namespace {

/// Turns "TF/s/rank" into "tf_s_rank" and "%" into "percent".
std::string snake_case(const std::string& text) {
  std::string name;
  for (const char c : text) {
    if (c == '%')
      name += "percent";
    else if (std::isalnum(static_cast<unsigned char>(c)) != 0)
      name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    else if (!name.empty() && name.back() != '_')
      name += '_';
  }
  while (!name.empty() && name.back() == '_') name.pop_back();
  return name;
}

/// Adds a value, or replaces the value of the same name.
void put(Fields& row, const std::string& name, const Value& value) {
  const auto same = std::ranges::find(row, name, &Fields::value_type::first);
  if (same == row.end())
    row.emplace_back(name, value);
  else
    same->second = value;
}

std::string unit_of(const ResultEntry& entry, const std::string& name) {
  const auto unit = std::ranges::find(entry.units, name, &Fields::value_type::first);
  return unit == entry.units.end() ? "" : "_" + snake_case(to_text(unit->second));
}

Fields csv_fields(const RunReport& report, const ResultEntry& entry) {
  Fields row{{"app", report.program},
             {"git", report.build.git_sha},
             {"start", report.start},
             {"host", report.ranks.empty() ? "" : report.ranks[0].host},
             {"ranks", std::ssize(report.ranks)}};
  Fields measured;
  for (const auto& [name, value] : entry.measurements)
    put(measured, snake_case(name) + unit_of(entry, name), value);
  for (const auto& [name, value] : report.configuration) {
    const bool is_taken = std::ranges::count(measured, name, &Fields::value_type::first) > 0;
    put(row, (is_taken ? "option_" : "") + snake_case(name), value);
  }
  for (const auto& [name, value] : entry.key) put(row, snake_case(name), value);
  for (const auto& [name, value] : measured) put(row, name, value);
  if (!entry.timing.samples_ms.empty()) {
    const Statistics s = entry.timing.statistics();
    put(row, "time_low_ms", s.median_low);
    put(row, "time_high_ms", s.median_high);
    put(row, "cpu_share", entry.timing.cpu_share);
  }
  put(row, "result", std::string(name_of(judge_row(report, entry).validity)));
  return row;
}

}  // namespace

std::string csv_text(const RunReport& report) {
  std::vector<Fields> rows;
  std::vector<Value> names;
  for (const ResultEntry& entry : report.results) {
    rows.push_back(csv_fields(report, entry));
    for (const auto& [name, value] : rows.back())
      if (std::ranges::find(names, Value(name)) == names.end()) names.emplace_back(name);
  }
  std::string text = csv_row(names);
  for (const Fields& row : rows) {
    std::vector<Value> values;
    for (const Value& name : names) {
      const auto field = std::ranges::find(row, to_text(name), &Fields::value_type::first);
      values.push_back(field == row.end() ? Value("") : field->second);
    }
    text += csv_row(values);
  }
  return text;
}

}  // namespace gyre
