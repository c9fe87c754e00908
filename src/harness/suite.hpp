#pragma once
// A suite runs the cases of an app and writes their rows: to the table, to the report, and to the
// file of rows. An app is options, cases, and columns.
//
//     Suite<Row> suite(context, report, options, table);
//     for (each case)
//       suite.attempt(label, many, [&] {               keeps the usage error of one of many cases
//         std::vector<Row> rows = suite.wanted(...);   without rows of an earlier run (--resume)
//         MyCase of(...);                              planned, allocated, filled
//         for (Row& row : rows) suite.measure(of, row.pass, measuring, backend, row);
//       });
//     suite.require_rows();

#include <fmt/ranges.h>

#include <functional>
#include <string>

#include "comm/agree.hpp"
#include "harness/backend.hpp"
#include "harness/case.hpp"
#include "harness/row.hpp"
#include "report/repeat.hpp"

namespace gyre {

struct MeasureOptions {
  RepeatOptions repeats;
  int warmup = 1;              ///< runs before the timed ones; at least 1 if results are verified
  std::string check = "last";  ///< none, last, all
  double tol_scale = 1;
  bool verifies() const { return check != "none"; }
};

struct Measured {
  Timing timing;
  double last_ms = 0;     ///< time of the last run on this rank
  SentTraffic sent;       ///< traffic of this rank in the last run
  Verification checks{};  ///< merged over all ranks; empty without verification
};

/// Measures a pass of a case. Messages of `backend` are checked outside of timed runs. Collective
/// over `world`, which has all ranks and is of host memory.
Measured measure(Case& subject, Pass pass, const MeasureOptions& options, Communicator& world,
                 Backend& backend);

template <class Row>
class Suite {
 public:
  /// Prints the header of the table. The arguments, except `options`, must outlive the suite.
  Suite(AppContext& context, RunReport& report, const ReportOptions& options,
        const Table<Row>& table)
      : context_(context),
        report_(report),
        table_(table),
        shown_(shown_table(context, options, table)) {
    context_.outputs.print(shown_.header());
  }

  /// Returns the rows whose keys no row of an earlier run has.
  std::vector<Row> wanted(std::vector<Row> rows) {
    std::erase_if(rows, [&](const Row& row) { return context_.rows.has(row.key); });
    return rows;
  }

  /// Measures a pass of a case and adds its row; complete(row, measured) fills in the columns of
  /// the app. Collective.
  template <class Complete>
  void measure(Case& subject, Pass pass, const MeasureOptions& options, Backend& backend, Row row,
               const Complete& complete) {
    Communicator& world = context_.world;
    const Measured measured = gyre::measure(subject, pass, options, world, backend);
    row.timing = measured.timing;
    row.time_ms = row.timing.statistics();
    row.finished = utc_now();
    row.messages = all_reduce_value(world, measured.sent.messages, ReduceOp::max);
    row.bytes_sent = all_reduce_value(world, measured.sent.bytes, ReduceOp::max);
    row.wire_bytes = all_reduce_value(world, measured.sent.bytes, ReduceOp::sum);
    if (options.verifies()) {
      row.check = check_text(report_, measured.checks);
      row.error_over_tolerance = measured.checks.max_error_over_tolerance();
      report_.verification.merge_repeat(measured.checks);
    }
    complete(row, measured);
    add(std::move(row));
  }

  /// Adds a row to the report, the file of rows and the table. Collective.
  void add(Row row) {
    finish_row(context_, report_, entry_of(row, table_));
    context_.outputs.print(shown_.row(row));
    rows_.push_back(std::move(row));
  }

  /// Calls work(). A usage error that all ranks agree on is rethrown, or kept as "LABEL: REASON" if
  /// the case is one of `many`. Returns the kept error, or "".
  std::string attempt(const std::string& label, bool many, const std::function<void()>& work) {
    try {
      work();
    } catch (const AgreedError& error) {
      if (error.code() != ExitCode::usage || !many) throw;
      refused_.push_back(label + ": " + error.what());
      return error.what();
    }
    return "";
  }
  /// Throws all refusals as a usage error if there is no row. Collective.
  void require_rows() {
    run_agreed(context_.world, "report", [&] {
      if (rows_.empty() && context_.rows.skipped() == 0)
        throw_usage("{}", fmt::join(refused_, "\n"));
    });
  }

  const std::vector<Row>& rows() const { return rows_; }
  /// A "# refused" line for each refusal.
  std::string refusals() const {
    std::string text;
    for (const std::string& reason : refused_) text += "# refused " + reason + "\n";
    return text;
  }
  /// Explains the marks in the table; "" without marks.
  std::string legend() const { return shown_.legend(rows_); }

 private:
  AppContext& context_;
  RunReport& report_;
  const Table<Row>& table_;
  Table<Row> shown_;
  std::vector<Row> rows_;
  std::vector<std::string> refused_;
};

}  // namespace gyre
