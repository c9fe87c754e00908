#pragma once
// Result tables. One list of columns defines the header, the rows and the CSV.
//
//     Table<Row> table({
//         {"tokens", "", 8, 0, &Row::tokens},
//         {"schedule", "", 10, 0, &Row::schedule, Align::left},
//         {"t_med", "ms", 8, 3, &Row::t_med}});
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
  bool scaled = false;  ///< SI prefix in each cell: 0.1352 TF/s is "135 G" under "F/s"
};

/// The text of one cell. A double is in fixed point, in scientific notation if that does not fit,
/// or has three digits and an SI prefix if the column is scaled. NaN is "n/a".
std::string cell_text(const ColumnFormat& format, const Value& value);
/// The mark after a figure that is noisy, or smaller than its noise.
inline constexpr char doubt_mark = '~';
/// The line below a table that explains the mark.
inline constexpr const char* doubt_legend =
    "# ~ the timing breaks a run rule (RESULT says which), or the figure is below its noise\n";

/// The header: names and units, each after a '#'. Ends with a newline, as all texts here do.
std::string header_text(const std::vector<ColumnFormat>& formats);

/// One line. A cell that is too wide shifts the next ones to the right, at least one blank apart.
/// Columns realign as soon as there is room.
std::string row_text(const std::vector<ColumnFormat>& formats,
                     const std::vector<std::string>& cells);

/// One line of CSV. Doubles have all their digits, and NaN is an empty field. Text is quoted where
/// CSV needs it (RFC 4180).
std::string csv_row(const std::vector<Value>& values);

/// Indices of the columns of `all` that --columns chooses: the default ones, "all", or names. An
/// unknown name is a usage error that suggests the nearest column.
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

  /// Shown only if --columns asks for it.
  Column extra() const {
    Column column = *this;
    column.by_default = false;
    return column;
  }
  /// Gives each cell its own SI prefix. `unit`, that of the values, may begin with one.
  Column with_prefix() const {
    Column column = *this;
    column.scaled = true;
    return column;
  }
  /// Adds doubt_mark to the cells of rows for which `when` holds.
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

  /// The table with the columns that --columns chooses.
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
  /// The header, the rows and the legend.
  std::string text(const std::vector<Row>& rows) const {
    std::string text = header();
    for (const Row& each : rows) text += row(each);
    return text + legend(rows);
  }
  /// The legend if a row has a mark, else "".
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
  /// The units of the columns that have one.
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
