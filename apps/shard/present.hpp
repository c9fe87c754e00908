#pragma once
// Reports the rows of a run of gyre-shard over a batch, or of Ulysses.

#include <algorithm>

#include "apps/shard/options.hpp"

namespace gyre {

/// Prints the table and the "#" lines below it, and writes the requested files.
template <class Row>
ExitCode present(const ShardOptions& o, AppContext& context, RunReport& report,
                 const Table<Row>& table, const std::vector<Row>& rows, const char* key,
                 const std::string& notes = "") {
  for (const Row& row : rows) {
    ResultEntry entry = entry_of(row, table);
    entry.verified.reset();
    if (!report.verification.empty()) entry.verified = report.verification.passed();
    entry.key = {*std::find_if(entry.measurements.begin(), entry.measurements.end(),
                               [&](const auto& field) { return field.first == key; })};
    report.results.push_back(std::move(entry));
  }
  return finish_run(context, report, o.report, [&] {
    return shown_table(context, o.report, table).text(rows) + (context.quiet ? "" : notes);
  });
}

}  // namespace gyre
