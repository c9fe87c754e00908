#include "report/row_log.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/json.hpp"
#include "io/trust/sha256.hpp"
#include "report/result.hpp"

namespace gyre {
namespace {

constexpr const char* schema = "gyre-result/1";

/// An identifier that distinguishes the runs of one file.
std::string run_id(const RunReport& report) {
  Sha256 sha;
  const std::string text = fmt::format("{} {} {} {}", report.start, report.command_line, getpid(),
                                       report.ranks.empty() ? "" : report.ranks[0].host);
  sha.add(text.data(), text.size());
  return sha.hex().substr(0, 12);
}

[[noreturn]] void refuse_line(const std::string& path, int64_t number, const std::string& line) {
  throw_usage("{}: line {} is no line of {}: '{}'; another name makes a new file", path, number,
              schema, line.substr(0, 60));
}

Json parse_line(const std::string& path, int64_t number, const std::string& line) {
  Json json;
  try {
    json = parse_json(path, line, schema);
  } catch (const Error&) {
    json = nullptr;  // the error message below shows the line
  }
  const auto has_text = [&](const char* key) {
    return json.contains(key) && json[key].is_string();
  };
  if (json.is_object() && has_text("schema") && json["schema"] == schema && has_text("kind"))
    return json;
  refuse_line(path, number, line);
}

/// A row of an earlier run.
struct EarlierRow {
  std::string run;
  bool measured = false;  ///< its timing meets the run rules (repeat.hpp)
  StandingRow verdict;

  explicit EarlierRow(const Json& row) : run(row.value("run", "")) {
    const Json status = row.value("status", Json::object());
    measured = status.value("measured", false);
    verdict = {status.value("result", "INVALID"),
               status.value("reasons", std::vector<std::string>())};
  }
  /// Applies the load of other processes, which the "end" line of the row's run reports.
  void add_load(const Json& end) {
    const Json load = end.value("foreign_load", Json::object());
    if (!load.value("cores", Json()).is_number()) return;
    const std::string breach =
        breach_text({load.value("host", ""), load.value("cores", 0.0), load.value("of_cores", 0)});
    if (breach.empty()) return;
    measured = false;
    if (verdict.result == name_of(Validity::valid)) verdict.result = name_of(Validity::unofficial);
    verdict.reasons.push_back(breach);
  }
  /// The row is kept if it is not INVALID and, for "measured", its timing meets the run rules.
  bool stands(const std::string& mode) const {
    return verdict.result != name_of(Validity::invalid) && (mode == "finished" || measured);
  }
};

}  // namespace

/// The open file. Exists on rank 0 only.
class RowLog::File {
 public:
  explicit File(std::string path)
      : path_(std::move(path)),
        descriptor_(open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666)),
        closes_(&descriptor_) {
    if (descriptor_ < 0) fail("cannot be opened");
    if (flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
      throw_runtime("{}: another run is writing it", path_);
    cut_torn_line();
  }

  /// Kept rows, by key, of the runs with this identity.
  std::map<std::string, StandingRow> finished(const std::string& identity,
                                              const std::string& mode) const {
    std::map<std::string, EarlierRow> rows;  // the newest row of a key counts
    std::map<std::string, bool> is_same;
    std::ifstream file(path_);
    int64_t number = 0;
    for (std::string line; std::getline(file, line);) {
      const Json json = parse_line(path_, ++number, line);
      try {
        const std::string kind = json["kind"];
        if (kind == "run") is_same[json.value("id", "")] = identity_of(line) == identity;
        if (kind == "run" || !is_same[json.value("run", "")] || mode == "none") continue;
        if (kind == "row")
          rows.insert_or_assign(dump_json(json.value("key", Json::object())), EarlierRow(json));
        if (kind != "end") continue;
        for (auto& [key, row] : rows)
          if (row.run == json.value("run", "")) row.add_load(json);
      } catch (const Json::exception&) {
        refuse_line(path_, number, line);  // a value has the wrong type
      }
    }
    std::map<std::string, StandingRow> standing;
    for (const auto& [key, row] : rows)
      if (row.stands(mode)) standing.emplace(key, row.verdict);
    return standing;
  }

  void append(const std::string& line) {
    const off_t before = lseek(descriptor_, 0, SEEK_END);
    const std::string text = line + "\n";
    errno = 0;
    const ssize_t written = ::write(descriptor_, text.data(), text.size());
    if (written == static_cast<ssize_t>(text.size()) && fsync(descriptor_) == 0)
      return require_its_name();
    const int reason = errno == 0 ? ENOSPC : errno;
    if (ftruncate(descriptor_, before) != 0) errno = reason;
    errno = reason;
    fail("cannot be written");
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw_runtime("{} {}: {}", path_, what, std::strerror(errno));
  }

  /// Throws if the file was removed or replaced: nobody would find its rows.
  void require_its_name() const {
    struct stat mine {
    }, named{};
    if (fstat(descriptor_, &mine) != 0) fail("cannot be looked at");
    if (stat(path_.c_str(), &named) != 0 || named.st_dev != mine.st_dev ||
        named.st_ino != mine.st_ino)
      throw_runtime("{} is no longer the file that this run writes: it was removed or replaced",
                    path_);
  }

  /// Truncates the incomplete last line that a run leaves if it is killed during a write.
  void cut_torn_line() {
    std::ifstream file(path_);
    std::string line;
    off_t complete = 0;
    for (int64_t number = 1; std::getline(file, line); ++number) {
      if (file.eof()) break;  // the line has no newline
      if (number == 1) parse_line(path_, number, line);
      complete += static_cast<off_t>(line.size()) + 1;
    }
    const bool torn = lseek(descriptor_, 0, SEEK_END) != complete;
    const std::string begin = fmt::format("{{\"schema\":\"{}\"", schema);
    if (torn && complete == 0 && !begin.starts_with(line.substr(0, begin.size())))
      parse_line(path_, 1, line);
    if (torn && ftruncate(descriptor_, complete) != 0) fail("cannot be cut");
  }

  struct Close {
    void operator()(const int* descriptor) const {
      if (*descriptor >= 0) close(*descriptor);
    }
  };

  std::string path_;
  int descriptor_;
  std::unique_ptr<int, Close> closes_;  // closes also if the constructor throws
};

RowLog::RowLog(Communicator& world) : world_(world) {}
RowLog::~RowLog() = default;

void RowLog::begin(const RunReport& report, const ReportOptions& options) {
  run_agreed(world_, "--resume", [&] {
    if (options.resume != "none" && !options.in_lines())
      throw_usage("--resume {} needs -J FILE.jsonl, the file that has the rows", options.resume);
  });
  open_ = options.in_lines();
  if (!open_) return;
  std::string rows;
  run_on_root(world_, "results", [&] {
    run_ = run_id(report);
    const std::string line = run_line(report, run_);
    file_ = std::make_unique<File>(options.json);
    Json list = Json::array();
    for (const auto& [key, row] : file_->finished(identity_of(line), options.resume))
      list.push_back({key, row.result, row.reasons});
    rows = dump_json(list);
    file_->append(line);
  });
  for (const Json& row : parse_json("rows that stand", broadcast_string(world_, rows, 0), "JSON"))
    finished_[row[0].get<std::string>()] = {row[1].get<std::string>(),
                                            row[2].get<std::vector<std::string>>()};
}

bool RowLog::has(const Fields& key) {
  const auto found = finished_.find(key_text(key));
  if (found == finished_.end()) return false;
  standing_.push_back(found->second);
  return true;
}

void RowLog::write(const RunReport& report) {
  if (!open_) return;
  run_on_root(world_, "results", [&] {
    for (; written_ < report.results.size(); ++written_)
      file_->append(row_line(report, report.results[written_], run_));
  });
}

void RowLog::end(const RunReport& report) {
  write(report);
  if (!open_) return;
  run_on_root(world_, "results", [&] { file_->append(end_line(report, run_)); });
}

}  // namespace gyre
