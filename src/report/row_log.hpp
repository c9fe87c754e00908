#pragma once
// Results as lines: each row is on disk as soon as it is measured.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "report/report_options.hpp"
#include "report/value.hpp"

namespace gyre {

struct RunReport;

/// The verdict of a row of an earlier run, as the row and the end of that run have it.
struct StandingRow {
  std::string result;  ///< "VALID", ...
  std::vector<std::string> reasons;
};

/// Appends a run to a file of lines (gyre-result/1: run, row, ..., end), each with one write and
/// flushed to disk. Without begin(), or with options that ask for no such file, nothing is written.
class RowLog {
 public:
  explicit RowLog(Communicator& world);
  ~RowLog();
  RowLog(const RowLog&) = delete;
  RowLog& operator=(const RowLog&) = delete;

  /// Opens the file, drops a last line that was cut off, reads the rows that need not be measured
  /// again, and writes the run. Throws a usage error when the file holds anything but results, or
  /// is being written by another run. Collective.
  void begin(const RunReport& report, const ReportOptions& options);
  /// Whether the row with this key stays; counts it. Same answer on every rank.
  bool has(const Fields& key);
  /// Writes the rows of the report that are not written yet. Collective.
  void write(const RunReport& report);
  /// Writes those, and the end. Collective.
  void end(const RunReport& report);
  /// The rows that has() found.
  const std::vector<StandingRow>& standing() const { return standing_; }
  int64_t skipped() const { return std::ssize(standing_); }

 private:
  class File;
  Communicator& world_;
  std::unique_ptr<File> file_;  // on rank 0
  bool open_ = false;           // on every rank
  std::string run_;
  std::map<std::string, StandingRow> finished_;  // by key, as JSON
  std::vector<StandingRow> standing_;
  size_t written_ = 0;
};

}  // namespace gyre
