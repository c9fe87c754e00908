#pragma once
// Rows of results: their common fields, and their form in the report.

#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "report/result.hpp"
#include "report/row_columns.hpp"
#include "report/table.hpp"

namespace gyre {

/// Common fields of rows. Rows of an app derive from it, and may hide further().
struct MeasuredRow {
  Fields key;          ///< the independent variables that tell rows apart
  Timing timing;       ///< times of a run; no samples: nothing was timed
  Statistics time_ms;  ///< times of the slowest rank
  double flops = std::numeric_limits<double>::quiet_NaN();       ///< of a run, sum over ranks
  double wire_bytes = std::numeric_limits<double>::quiet_NaN();  ///< sum over ranks, counted
  int64_t messages = 0;                                          ///< in a run, maximum over ranks
  int64_t bytes_sent = 0;                                        ///< in a run, maximum over ranks
  double error_over_tolerance = std::numeric_limits<double>::quiet_NaN();  ///< NaN: not checked
  std::string check = "-";                                                 ///< "ok", "FAILED", "-"
  std::string finished;                                                    ///< UTC, ISO 8601

  /// Measurements without a column: name, value, unit.
  std::vector<std::tuple<std::string, Value, std::string>> further() const { return {}; }
};

/// The row as an entry of a report.
template <class Row>
ResultEntry entry_of(const Row& row, const Table<Row>& table) {
  ResultEntry entry{row.key, row.timing, table.fields(row), table.units()};
  for (const auto& [name, value, unit] : row.further()) entry.add(name, value, unit);
  if (row.check != "-") entry.verified = row.check == "ok";
  entry.flops = row.flops;
  entry.bytes_wire = row.wire_bytes;
  return entry;
}

/// The columns that --columns names; all of them with -v, unless it names some.
template <class Row>
Table<Row> shown_table(const AppContext& context, const ReportOptions& options,
                       const Table<Row>& table) {
  return table.chosen(shown_columns(context, options));
}

}  // namespace gyre
