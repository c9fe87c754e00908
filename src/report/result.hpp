#pragma once
// The report of a run: "#" lines, FOM, VERIFY and RESULT lines, and the JSON file, all made from
// one RunReport.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "core/version.hpp"
#include "report/app.hpp"
#include "report/machine_report.hpp"
#include "report/repeat.hpp"
#include "report/row_log.hpp"
#include "report/value.hpp"
#include "report/verify.hpp"

namespace gyre {

struct RankInfo {
  int rank = 0;
  std::string host;
  std::string device;            ///< "cpu", or index, name and compute capability of the GPU
  std::string device_uuid = {};  ///< UUID of the GPU, else ""
};

struct InputInfo {
  std::string path;    ///< as given; shown without its folder
  std::string sha256;  ///< 64 hexadecimal digits, or "" when not computed
};

/// One measured configuration.
struct ResultEntry {
  Fields key;                         ///< the independent variables that tell entries apart
  Timing timing;                      ///< has no samples if nothing was timed
  Fields measurements;                ///< further results: rates, imbalance, exposed communication
  Fields units;                       ///< units of the measurements that have one
  std::optional<bool> verified = {};  ///< nullopt: not checked
  double flops = std::numeric_limits<double>::quiet_NaN();  ///< of unmasked pairs; NaN: unknown
  double bytes_wire = std::numeric_limits<double>::quiet_NaN();  ///< counted, sum over ranks
  void add(const std::string& name, const Value& value, const std::string& unit);
};

/// A figure of merit, printed on a line of its own.
struct Fom {
  std::string metric;  ///< "tokens_per_s"
  double value = 0;    ///< NaN: unknown
  std::string unit;    ///< "1/s"
  Fields tags;         ///< the configuration it belongs to
  /// The largest possible value; the least is 0. A value outside this range makes the result
  /// INVALID.
  double most = std::numeric_limits<double>::max();
};

/// Memory of the rank that uses most, in bytes.
struct MemoryReport {
  int64_t planned = 0;  ///< arrays of the largest configuration; 0: not planned
  int64_t start = 0;    ///< of the process at the start: program, libraries, shared memory of MPI
  int64_t peak = 0;     ///< peak of the process
  void plan(int64_t bytes) { planned = std::max(planned, bytes); }
};

struct RunReport {
  std::string program;
  BuildInfo build;
  std::vector<std::string> arguments;
  std::string command_line;
  std::string start;     ///< UTC, ISO 8601
  std::string launcher;  ///< "hydra", "srun", "openmpi", "pmi" or "none"
  std::string job;       ///< "slurm 12345", "pbs 77.host", "lsf 8" or "none"
  std::vector<RankInfo> ranks;
  MachineReport machine;
  Fields libraries;                    ///< mpi, hdf5, cuda, nccl: version, "yes" or "no"
  Fields environment;                  ///< allow-listed variables that are set
  Fields configuration;                ///< what the options and facts are; see OptionTable
  std::vector<std::string> not_shown;  ///< names in it that the header leaves out
  std::vector<InputInfo> inputs;
  std::vector<ResultEntry> results;
  std::vector<Fom> foms;
  Verification verification;
  /// Why the input has no value to compare ("no documents"), or "". Such a run, if it has no
  /// failure, neither passed nor failed: its checks compared no element.
  std::string nothing_to_verify;
  std::vector<std::string> unofficial_reasons;  ///< known at the start: "shared GPU", "sanitizer"
  /// Reasons from the app: answers of the input that were not compared.
  std::vector<std::string> unverified_reasons = {};
  std::vector<StandingRow> standing = {};  ///< rows of earlier runs, kept instead of measured
  MemoryReport memory;
  HostLoad load_at_start;
  ForeignLoad foreign_load;  ///< known at the end
};

/// From best to worst; the worst of several verdicts counts.
enum class Validity { valid, unofficial, unverified, invalid };
std::string_view name_of(Validity validity);  ///< "VALID", ...

struct Verdict {
  Validity validity = Validity::valid;
  std::vector<std::string> reasons;
};

/// Starts a report at the beginning of an app's body, with everything that is known about the run
/// and its machine. The options of `context` and `facts`, what the app derives from options and
/// inputs, are its configuration; the files that options read are its inputs, with checksums.
/// `libraries` (such as HDF5's version) are added to mpi, cuda and nccl. Collective.
RunReport begin_report(const AppContext& context, const Fields& facts, const Fields& libraries);

/// The checksum of the input `path` of a report, or "" for an empty path.
const std::string& checksum_of(const RunReport& report, const std::string& path);

/// Prints the header unless the run is quiet. Begins the file of rows (context.rows), if `options`
/// name one, and the progress line of `rows` rows. Measures the load by other processes from here
/// on. Collective.
void start_run(AppContext& context, RunReport& report, const ReportOptions& options, int64_t rows);

/// The value of --columns; -v turns "default" into "all".
std::string shown_columns(const AppContext& context, const ReportOptions& options);

/// Adds a row to the report, the file of rows and the progress. Collective.
void finish_row(AppContext& context, RunReport& report, ResultEntry entry);

/// Adds the figure of merit "average_METRIC", the mean over the rows of a sweep, like the average
/// bus bandwidth of nccl-tests. NaN values are left out. Adds nothing for fewer than two rows.
void add_average(std::vector<Fom>& figures, const std::string& metric, const std::string& unit,
                 std::vector<double> values);

/// The verdict of `checks` as a table cell: "ok", "FAILED", or "-" if there was nothing to verify.
std::string check_text(const RunReport& report, const Verification& checks);

/// The first of these that applies, with all reasons that apply:
///   INVALID     a check failed, or a figure of merit is impossible
///   UNVERIFIED  nothing was checked, or for a reason from the app
///   UNOFFICIAL  modified source tree (known with git only), build without optimisation or with a
///               sanitizer, scaled tolerances, a reason from the app, broken run rules (repeat.hpp)
/// else VALID. The verdict is no better than that of any kept row of an earlier run.
Verdict judge(const RunReport& report);

/// Verdict on one row, without the load of other processes, which is known at the end of the run.
Verdict judge_row(const RunReport& report, const ResultEntry& entry);

/// 1 for INVALID, else 0.
ExitCode exit_code_of(const Verdict& verdict);

/// "# memory of a rank: 12.6 MB planned, 61.2 MB of its process at most, 48.1 MB of these at the
/// start"
std::string memory_text(const MemoryReport& memory);

/// The "#" lines that identify the run. Ends with a newline, as all texts here do.
std::string header_text(const RunReport& report);

/// FOM lines (none if the result is INVALID), VERIFY lines with the `most` worst values of each
/// failed check, and the RESULT line.
std::string footer_text(const RunReport& report, size_t most = 1);

/// "hosts node01: 0-3, 8 | node02: 4-7": at most `most` hosts, then the number of the others.
std::string hosts_text(const std::vector<RankInfo>& ranks, size_t most = 8);

/// "devices (rank:device) node01: 0:0 1:1 2:0 3:1 NVIDIA H100 (9.0) | node02: ...": what the ranks
/// of at most `most` hosts compute on, then the number of other hosts; "" when no rank uses a GPU.
std::string devices_text(const std::vector<RankInfo>& ranks, size_t most = 8);

/// Variables that may go into a report: those that change the behaviour of a run; no names, paths
/// or secrets.
Fields allowed_environment();

/// The document `gyre-result/1`; NaN and infinities become null. `end`: UTC, ISO 8601.
std::string json_text(const RunReport& report, const std::string& end);
/// The lines of kind "run", "row" and "end" of gyre-result/1, without newlines. `run` distinguishes
/// the runs of a file.
std::string run_line(const RunReport& report, const std::string& run);
std::string row_line(const RunReport& report, const ResultEntry& entry, const std::string& run);
std::string end_line(const RunReport& report, const std::string& run);
/// The JSON text of a row's key, as in a "row" line.
std::string key_text(const Fields& key);
/// The part of a "run" line that must be equal for rows of that run to be kept: program, build,
/// libraries, environment, ranks on hosts and devices, configuration and inputs.
std::string identity_of(const std::string& run_line);
/// One row per result: program, build, host, ranks, configuration, key, measurements with their
/// units, statistics and verdict. Names are in snake_case.
std::string csv_text(const RunReport& report);

/// Ends a run. Gives all outputs of `context` their final names (data files of an INVALID result
/// are NAME.invalid.h5), writes the files that `options` name, and prints (Outputs::publish).
/// `make` is called on rank 0 and returns the text before the FOM, VERIFY and RESULT lines. Returns
/// the exit code of the verdict or, if that is ok, of --at-least. Collective.
ExitCode finish_run(AppContext& context, RunReport& report, const ReportOptions& options,
                    const std::function<std::string()>& make);

/// "2026-01-31T12:00:00Z"
std::string utc_now();

/// An array of expected results that the input holds.
struct AnswerUse {
  std::string name;
  std::string why_not = {};  ///< reason; "" if every element was compared
  /// False if the options name other results, so that no comparison is expected.
  bool was_asked = true;
};

/// "# reference by NumPy: compared in full: logprob, entropy; not compared: d_entropy (--pass fwd)"
std::string answers_text(const std::string& generator, const std::vector<AnswerUse>& uses);

/// Makes the result UNVERIFIED if an answer that the options ask for was not compared.
void judge_answers(RunReport& report, const std::vector<AnswerUse>& uses);

}  // namespace gyre
