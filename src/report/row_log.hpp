#pragma once
// Results as lines: each row is on disk as soon as it is measured.

#include <memory>
#include <set>
#include <string>

#include "comm/communicator.hpp"
#include "report/report_options.hpp"
#include "report/value.hpp"

namespace gyre {

struct RunReport;

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
  /// Rows that has() found.
  int64_t skipped() const { return skipped_; }

 private:
  class File;
  Communicator& world_;
  std::unique_ptr<File> file_;  // on rank 0
  bool open_ = false;           // on every rank
  std::string run_;
  std::set<std::string> finished_;  // keys, as JSON
  size_t written_ = 0;
  int64_t skipped_ = 0;
};

}  // namespace gyre
