#include "report/table.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "core/error.hpp"
#include "report/options.hpp"

namespace gyre {
namespace {

constexpr size_t gap = 2;  // blanks before a column

constexpr std::string_view prefixes = "kMGTP";  // 10^3, 10^6, ...

/// The factor of the SI prefix of a scaled column's unit; 1 without a prefix.
double prefix_of(const ColumnFormat& format) {
  const size_t at = prefixes.find(format.unit[0]);
  return at == std::string_view::npos ? 1 : std::pow(1e3, at + 1);
}

std::string unit_text(const ColumnFormat& format) {
  if (format.unit.empty()) return "";
  const bool drops = format.scaled && prefix_of(format) != 1;
  return "(" + format.unit.substr(drops ? 1 : 0) + ")";
}

size_t width_of(const ColumnFormat& format) {
  return std::max(
      {static_cast<size_t>(format.width), format.name.size(), unit_text(format).size()});
}

/// Aligns `cells` in their columns. The first column starts after a gap, which leaves room for '#'.
std::string line(const std::vector<ColumnFormat>& formats, const std::vector<std::string>& cells) {
  std::string text;
  size_t column_begin = 0;
  for (size_t i = 0; i < formats.size(); ++i) {
    column_begin += gap;
    const size_t width = width_of(formats[i]);
    size_t begin = column_begin;
    if (formats[i].align == Align::right && cells[i].size() < width)
      begin += width - cells[i].size();
    if (!cells[i].empty()) {
      if (!text.empty()) begin = std::max(begin, text.size() + 1);
      text.append(begin - text.size(), ' ');
      text += cells[i];
    }
    column_begin += width;
  }
  return text;
}

std::string comment(std::string text) {
  if (text.empty()) text = " ";
  text[0] = '#';
  return text + "\n";
}

}  // namespace

std::string cell_text(const ColumnFormat& format, const Value& value) {
  const double* number = std::get_if<double>(&value);
  if (number == nullptr || std::isnan(*number)) return to_text(value);
  if (format.scaled) return si_text(*number * prefix_of(format), "");
  std::string text = fmt::format("{:.{}f}", *number, format.precision);
  const double smallest = 0.5 * std::pow(10.0, -format.precision);
  const bool vanishes = *number != 0 && std::abs(*number) < smallest;
  if (text.size() > width_of(format) || vanishes)
    text = fmt::format("{:.{}e}", *number, std::min(format.precision, 3));
  return text;
}

std::string header_text(const std::vector<ColumnFormat>& formats) {
  std::vector<std::string> names, units;
  for (const ColumnFormat& format : formats) {
    names.push_back(format.name);
    units.push_back(unit_text(format));
  }
  return comment(line(formats, names)) + comment(line(formats, units));
}

std::string row_text(const std::vector<ColumnFormat>& formats,
                     const std::vector<std::string>& cells) {
  GYRE_CHECK(cells.size() == formats.size(), "{} cells for {} columns", cells.size(),
             formats.size());
  return line(formats, cells) + "\n";
}

std::vector<size_t> chosen_columns(const std::vector<ColumnFormat>& all,
                                   const std::vector<bool>& is_default, const std::string& choice) {
  std::vector<size_t> chosen;
  std::vector<std::string> names;
  for (const ColumnFormat& format : all) names.push_back(format.name);
  for (size_t i = 0; i < all.size(); ++i)
    if (choice == "all" || (choice == "default" && is_default[i])) chosen.push_back(i);
  if (!chosen.empty()) return chosen;
  std::istringstream list(choice);
  for (std::string name; std::getline(list, name, ',');) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
      const std::string near = nearest(name, names);
      throw_usage("--columns: there is no column '{}'; there are {}{}", name,
                  fmt::join(names, ", "), near.empty() ? "" : "; nearest: " + near);
    }
    chosen.push_back(static_cast<size_t>(found - names.begin()));
  }
  if (chosen.empty()) throw_usage("--columns '{}' names no column", choice);
  return chosen;
}

std::string csv_row(const std::vector<Value>& values) {
  std::vector<std::string> cells;
  for (const Value& value : values) {
    const double* number = std::get_if<double>(&value);
    std::string cell = number && std::isnan(*number) ? "" : to_text(value);
    if (cell.find_first_of(",\"\r\n") != std::string::npos) {
      for (size_t at = 0; (at = cell.find('"', at)) != std::string::npos; at += 2)
        cell.insert(at, 1, '"');
      cell = '"' + cell + '"';
    }
    cells.push_back(std::move(cell));
  }
  return fmt::format("{}\n", fmt::join(cells, ","));
}

std::string as_comment(const std::string& line) {
  return "#" + (line.empty() ? line : line.substr(line[0] == '#' ? 1 : 0));
}

}  // namespace gyre
