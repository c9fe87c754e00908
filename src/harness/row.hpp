#pragma once
// Rows of results: their common fields, and their form in the report.

#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "report/repeat.hpp"
#include "report/result.hpp"
#include "report/table.hpp"

namespace gyre {

/// Common fields of rows. The row type of an app derives from it. If it has further fields, its
/// function further() lists their names, values and units.
struct MeasuredRow {
  Fields key;          ///< the independent variables that tell rows apart
  Timing timing;       ///< times of a run; no samples: nothing was timed
  Statistics time_ms;  ///< times of the slowest rank
  double flops = std::numeric_limits<double>::quiet_NaN();  ///< FLOPs of a run, summed over ranks
  double wire_bytes = std::numeric_limits<double>::quiet_NaN();  ///< bytes that all ranks sent
  int64_t messages = 0;    ///< that a rank sends in a run, at most
  int64_t bytes_sent = 0;  ///< that a rank sends in a run, at most
  double error_over_tolerance = std::numeric_limits<double>::quiet_NaN();  ///< NaN: not checked
  std::string check = "-";                                                 ///< "ok", "FAILED", "-"
  std::string finished;                                                    ///< UTC, ISO 8601
};

/// The row as an entry of a report.
template <class Row>
ResultEntry entry_of(const Row& row, const Table<Row>& table) {
  ResultEntry entry{row.key, row.timing, table.fields(row), table.units()};
  if constexpr (requires { row.further(); })
    for (const auto& [name, value, unit] : row.further()) entry.add(name, value, unit);
  if (row.check != "-") entry.verified = row.check == "ok";
  entry.flops = row.flops;
  entry.bytes_wire = row.wire_bytes;
  return entry;
}

/// The columns of `table` that --columns names, or all with -v if the option is absent.
template <class Row>
Table<Row> shown_table(const AppContext& context, const ReportOptions& options,
                       const Table<Row>& table) {
  return table.chosen(shown_columns(context, options));
}

/// Columns for the time and its spread. A Row has `timing` and its statistics, `time_ms`.
template <class Row>
std::vector<Column<Row>> timing_columns(int width, int precision) {
  return {Column<Row>{"time", "ms", width, precision, [](const Row& r) { return r.time_ms.median; }}
              .doubted([](const Row& r) { return !breaches_of(r.timing).empty(); }),
          Column<Row>{"min", "ms", width, precision, [](const Row& r) { return r.time_ms.min; }}
              .extra(),
          Column<Row>{"p95", "ms", width, precision, [](const Row& r) { return r.time_ms.p95; }}
              .extra(),
          {"cv", "%", 5, 1, [](const Row& r) { return 100 * r.time_ms.cv; }},
          Column<Row>{"reps", "", 5, 0, [](const Row& r) { return r.time_ms.count; }}.extra()};
}

/// Columns for the outcome. A Row has `error_over_tolerance`, `check` and `finished`.
template <class Row>
std::vector<Column<Row>> verdict_columns() {
  return {Column<Row>{"err_over_tol", "", 12, 4, &Row::error_over_tolerance}.extra(),
          {"check", "", 6, 0, &Row::check, Align::left},
          Column<Row>{"finished", "", 20, 0, &Row::finished, Align::left}.extra()};
}

/// Concatenates lists of columns.
template <class Row>
std::vector<Column<Row>> joined(const std::vector<std::vector<Column<Row>>>& parts) {
  std::vector<Column<Row>> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

}  // namespace gyre
