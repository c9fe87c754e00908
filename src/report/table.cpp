#include "report/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "core/error.hpp"

namespace gyre {
namespace {

constexpr size_t gap = 2;  // blanks before a column

std::string unit_text(const ColumnFormat& format) {
  return format.unit.empty() ? "" : "(" + format.unit + ")";
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

std::string row_text(const std::vector<ColumnFormat>& formats, const std::vector<Value>& values) {
  GYRE_CHECK(values.size() == formats.size(), "{} values for {} columns", values.size(),
             formats.size());
  std::vector<std::string> cells;
  for (size_t i = 0; i < values.size(); ++i) cells.push_back(cell_text(formats[i], values[i]));
  return line(formats, cells) + "\n";
}

namespace {

/// A unit as a part of a name: "%" is "percent", "max/mean" is "max_mean".
std::string unit_name(const std::string& unit) {
  std::string name;
  for (const char c : unit) {
    if (c == '%')
      name += "percent";
    else
      name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  }
  return name;
}

}  // namespace

std::string csv_header(const std::vector<ColumnFormat>& formats) {
  std::vector<Value> names;
  for (const ColumnFormat& format : formats)
    names.emplace_back(format.unit.empty() ? format.name
                                           : format.name + "_" + unit_name(format.unit));
  return csv_row(names);
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
