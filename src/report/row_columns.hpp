#pragma once
// Columns that the tables of several apps share, and the concatenation of lists of columns.

#include <vector>

#include "report/noise.hpp"
#include "report/table.hpp"

namespace gyre {

/// Time and its spread. Rows have `timing` and its statistics `time_ms`.
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

/// Outcome of a row. Rows have `error_over_tolerance`, `check` and `finished`.
template <class Row>
std::vector<Column<Row>> verdict_columns() {
  return {
      Column<Row>{"err_over_tol", "", 12, 4, [](const Row& r) { return r.error_over_tolerance; }}
          .extra(),
      {"check", "", 6, 0, [](const Row& r) { return r.check; }, Align::left},
      Column<Row>{"finished", "", 20, 0, [](const Row& r) { return r.finished; }, Align::left}
          .extra()};
}

/// Concatenates the lists.
template <class Row>
std::vector<Column<Row>> joined(const std::vector<std::vector<Column<Row>>>& parts) {
  std::vector<Column<Row>> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

}  // namespace gyre
