#pragma once
// Results as JSON lines. Each row is on disk as soon as it is measured.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "report/app.hpp"
#include "report/value.hpp"

namespace gyre {

struct RunReport;

/// The verdict on a row of an earlier run, from that row and the "end" line of its run.
struct StandingRow {
  std::string result;  ///< "VALID", ...
  std::vector<std::string> reasons;
};

/// Appends a run to a file of lines (gyre-result/1: run, row, ..., end). Each line is one write and
/// is flushed to disk. Writes nothing before begin(), or if the options name no such file.
class RowLog {
 public:
  explicit RowLog(Communicator& world);
  ~RowLog();
  RowLog(const RowLog&) = delete;
  RowLog& operator=(const RowLog&) = delete;

  /// Opens the file, drops a truncated last line, reads the rows that need not be measured again
  /// and writes the "run" line. Throws a usage error if the file holds anything but results, a
  /// runtime error if another run is writing it. Collective.
  void begin(const RunReport& report, const ReportOptions& options);
  /// Whether an earlier run's row with this key is kept; if so, counts it. Equal on all ranks.
  bool has(const Fields& key);
  /// Writes the rows of the report that have not been written yet. Collective.
  void write(const RunReport& report);
  /// Writes the remaining rows and the "end" line. Collective.
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
