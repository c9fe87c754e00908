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
#include <utility>
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
  bool scaled = false;  ///< a prefix for each cell: 0.1352 TF/s is "135 G" under "F/s"
};

/// One cell. Doubles: fixed point, or scientific when that does not fit, or three digits and an SI
/// prefix when the column is scaled; NaN is "n/a".
std::string cell_text(const ColumnFormat& format, const Value& value);
/// Behind a figure that is noisy or below its noise.
inline constexpr char doubt_mark = '~';
/// What the mark says; goes below a table that has one.
inline constexpr const char* doubt_legend =
    "# ~ the timing breaks a run rule (RESULT says which), or the figure is below its noise\n";

/// Two lines that start with '#': names and units. Ends with a newline, as all texts here do.
std::string header_text(const std::vector<ColumnFormat>& formats);

/// One line. A cell that is too wide pushes the next ones to the right, at least one blank apart;
/// columns realign as soon as there is room.
std::string row_text(const std::vector<ColumnFormat>& formats,
                     const std::vector<std::string>& cells);

/// One line of CSV. Doubles have all their digits, NaN is an empty field; text is quoted where CSV
/// needs it (RFC 4180).
std::string csv_row(const std::vector<Value>& values);

/// The columns of `all` that --columns names, by index: the default ones, "all", or names. Throws a
/// usage error that names the nearest column.
std::vector<size_t> chosen_columns(const std::vector<ColumnFormat>& all,
                                   const std::vector<bool>& is_default, const std::string& choice);

/// The line with a '#' in front, so that scripts skip it.
std::string as_comment(const std::string& line);

template <class Row>
struct Column {
  Column(std::string column_name, std::string column_unit, int column_width, int column_precision,
         std::function<Value(const Row&)> value_of, Align alignment = Align::right)
      : name(std::move(column_name)),
        unit(std::move(column_unit)),
        width(column_width),
        precision(column_precision),
        value(std::move(value_of)),
        align(alignment) {}

  /// Shown by --columns alone.
  Column extra() const {
    Column column = *this;
    column.by_default = false;
    return column;
  }
  /// With a prefix for each cell. The unit begins with that of the value.
  Column with_prefix() const {
    Column column = *this;
    column.scaled = true;
    return column;
  }
  /// Marked where `when` holds.
  Column doubted(std::function<bool(const Row&)> when) const {
    Column column = *this;
    column.doubtful = std::move(when);
    return column;
  }

  std::string name;
  std::string unit;
  int width;
  int precision;
  std::function<Value(const Row&)> value;
  Align align;
  bool by_default = true;
  bool scaled = false;
  std::function<bool(const Row&)> doubtful;
};

template <class Row>
class Table {
 public:
  explicit Table(std::vector<Column<Row>> columns) : columns_(std::move(columns)) {
    for (const Column<Row>& c : columns_)
      formats_.push_back({c.name, c.unit, c.width, c.precision, c.align, c.scaled});
  }

  /// The columns that --columns names.
  Table chosen(const std::string& choice) const {
    std::vector<bool> is_default;
    for (const Column<Row>& c : columns_) is_default.push_back(c.by_default);
    std::vector<Column<Row>> columns;
    for (const size_t i : chosen_columns(formats_, is_default, choice))
      columns.push_back(columns_[i]);
    return Table(std::move(columns));
  }

  std::string header() const { return header_text(formats_); }
  std::string row(const Row& row) const {
    std::vector<std::string> cells;
    for (size_t i = 0; i < columns_.size(); ++i) {
      cells.push_back(cell_text(formats_[i], columns_[i].value(row)));
      if (columns_[i].doubtful && columns_[i].doubtful(row)) cells.back() += doubt_mark;
    }
    return row_text(formats_, cells);
  }
  /// The header and the rows, and what their marks mean.
  std::string text(const std::vector<Row>& rows) const {
    std::string text = header();
    for (const Row& each : rows) text += row(each);
    return text + legend(rows);
  }
  /// The legend, when a row has a mark.
  std::string legend(const std::vector<Row>& rows) const {
    for (const Row& row : rows)
      for (const Column<Row>& c : columns_)
        if (c.doubtful && c.doubtful(row)) return doubt_legend;
    return "";
  }
  /// The cells of a row by column name, for JSON and CSV.
  Fields fields(const Row& row) const {
    Fields result;
    for (const Column<Row>& c : columns_) result.emplace_back(c.name, c.value(row));
    return result;
  }
  /// The units of those that have one.
  Fields units() const {
    Fields result;
    for (const Column<Row>& c : columns_)
      if (!c.unit.empty()) result.emplace_back(c.name, c.unit);
    return result;
  }

 private:
  std::vector<Column<Row>> columns_;
  std::vector<ColumnFormat> formats_;
};

}  // namespace gyre
