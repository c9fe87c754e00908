#pragma once
// Result tables: one list of columns makes the header, the rows and the CSV.
//
//     Table<Row> table({
//         {"tokens", "", 8, 0, [](const Row& r) { return r.tokens; }},
//         {"schedule", "", 10, 0, [](const Row& r) { return r.schedule; }, Align::left},
//         {"t_med", "ms", 8, 3, [](const Row& r) { return r.t_med; }}});
//
//     #   tokens  schedule       t_med
//     #                           (ms)
//         131072  ring          12.345
//         131072  allgather     13.800

#include <functional>
#include <string>
#include <vector>

#include "report/value.hpp"

namespace gyre {

enum class Align { right, left };

/// Format of a column. The width grows to fit name and unit.
struct ColumnFormat {
  std::string name;
  std::string unit;  ///< "" for none
  int width = 0;
  int precision = 0;  ///< digits after the point of doubles
  Align align = Align::right;
};

/// One cell. Doubles: fixed point, or scientific when that does not fit; NaN is "n/a".
std::string cell_text(const ColumnFormat& format, const Value& value);

/// Two lines that start with '#': names and units. Ends with a newline, as all texts here do.
std::string header_text(const std::vector<ColumnFormat>& formats);

/// One line. A cell that is too wide pushes the next ones to the right, at least one blank apart;
/// columns realign as soon as there is room.
std::string row_text(const std::vector<ColumnFormat>& formats, const std::vector<Value>& values);

/// "tokens,schedule,t_med_ms": units are appended to names, "%" as percent, other signs as "_".
std::string csv_header(const std::vector<ColumnFormat>& formats);
/// Doubles have all their digits, NaN is an empty field; text is quoted where CSV needs it (RFC
/// 4180).
std::string csv_row(const std::vector<Value>& values);

/// The line with a '#' in front, so that scripts skip it.
std::string as_comment(const std::string& line);

template <class Row>
struct Column {
  std::string name;
  std::string unit;
  int width;
  int precision;
  std::function<Value(const Row&)> value;
  Align align = Align::right;
};

template <class Row>
class Table {
 public:
  explicit Table(std::vector<Column<Row>> columns) : columns_(std::move(columns)) {
    for (const Column<Row>& c : columns_)
      formats_.push_back({c.name, c.unit, c.width, c.precision, c.align});
  }

  std::string header() const { return header_text(formats_); }
  std::string row(const Row& row) const { return row_text(formats_, values(row)); }
  /// The header and the rows.
  std::string text(const std::vector<Row>& rows) const {
    std::string text = header();
    for (const Row& each : rows) text += row(each);
    return text;
  }
  std::string csv(const std::vector<Row>& rows) const {
    std::string text = csv_header(formats_);
    for (const Row& row : rows) text += csv_row(values(row));
    return text;
  }
  /// The cells of a row by column name, for JSON and FOM tags.
  Fields fields(const Row& row) const {
    Fields result;
    for (const Column<Row>& c : columns_) result.emplace_back(c.name, c.value(row));
    return result;
  }

 private:
  std::vector<Value> values(const Row& row) const {
    std::vector<Value> result;
    for (const Column<Row>& c : columns_) result.push_back(c.value(row));
    return result;
  }

  std::vector<Column<Row>> columns_;
  std::vector<ColumnFormat> formats_;
};

}  // namespace gyre
