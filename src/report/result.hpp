#pragma once
// The report of a run: "#" lines, FOM, VERIFY and RESULT lines, and the JSON file, all made from
// one RunReport.

#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "core/version.hpp"
#include "report/app.hpp"
#include "report/statistics.hpp"
#include "report/value.hpp"
#include "report/verify.hpp"

namespace gyre {

struct RankInfo {
  int rank = 0;
  std::string host;
  std::string device;            ///< "cpu", or index, name and compute capability of the GPU
  std::string device_uuid = {};  ///< of the GPU, else ""
};

struct InputInfo {
  std::string path;    ///< as given; shown without its folder
  std::string sha256;  ///< 64 digits, or "" when not computed
};

/// One measured configuration.
struct ResultEntry {
  Fields key;           ///< the independent variables that tell entries apart
  Samples samples_ms;   ///< [rank][iteration]
  Fields measurements;  ///< further results: rates, imbalance, exposed communication
  double flops = std::numeric_limits<double>::quiet_NaN();  ///< of visible pairs only; NaN: unknown
  double bytes_wire = std::numeric_limits<double>::quiet_NaN();  ///< counted, sum over ranks
};

/// A figure of merit, printed on a line of its own.
struct Fom {
  std::string metric;  ///< "tokens_per_s"
  double value = 0;    ///< NaN: unknown
  std::string unit;    ///< "1/s"
  Fields tags;         ///< the configuration it belongs to
  /// The largest possible value; the least is 0. A finite one that is possible is no proof, but one
  /// that is impossible makes the result INVALID.
  double most = std::numeric_limits<double>::max();
};

struct RunReport {
  std::string program;
  BuildInfo build;
  std::vector<std::string> arguments;
  std::string command_line;
  std::string start;     ///< UTC, ISO 8601
  std::string launcher;  ///< "hydra", "srun", "openmpi" or "none"
  std::string job;       ///< "slurm 12345", "pbs 77.host" or "none"
  std::vector<RankInfo> ranks;
  Fields libraries;    ///< mpi, hdf5, cuda, nccl: version, "yes" or "no"
  Fields environment;  ///< allow-listed variables that are set
  Fields configuration;
  std::vector<InputInfo> inputs;
  std::vector<ResultEntry> results;
  std::vector<Fom> foms;
  Verification verification;
  std::vector<std::string> unofficial_reasons;  ///< the app's own: shared GPU, emulated network
};

enum class Validity { valid, unverified, unofficial, invalid };
std::string_view name_of(Validity validity);  ///< "VALID", ...

struct Verdict {
  Validity validity = Validity::valid;
  std::vector<std::string> reasons;
};

/// Starts a report at the beginning of an app's body, with everything that is known about the run.
/// `libraries` are added to mpi, cuda and nccl (HDF5's version, say).
RunReport begin_report(const AppContext& context, Fields configuration, const Fields& libraries);

/// INVALID when a check failed or a figure of merit is impossible, else UNVERIFIED when there was
/// none, else UNOFFICIAL for a modified source tree, a build without optimisation or with a
/// sanitizer, scaled tolerances or the app's own reasons, else VALID. All reasons that apply are
/// listed. A source tree without git counts as clean.
Verdict judge(const RunReport& report);

/// 1 for INVALID, else 0.
ExitCode exit_code_of(const Verdict& verdict);

/// The "#" lines that identify the run. Ends with a newline, as all texts here do.
std::string header_text(const RunReport& report);

/// FOM lines (none when the result is INVALID), VERIFY lines, the RESULT line.
std::string footer_text(const RunReport& report);

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

/// What a run prints and writes at its end. An empty path is no file.
struct RunTexts {
  std::string text;  ///< before the FOM, VERIFY and RESULT lines
  std::string csv_path, csv;
  std::string json_path;
};
/// Ends a run: names all outputs of `context`, but data files only when the result is not INVALID,
/// and prints (Outputs::publish). `make` is called on rank 0. Returns the exit code of the verdict.
/// Collective.
ExitCode finish_run(AppContext& context, const RunReport& report,
                    const std::function<RunTexts()>& make);

/// "2026-01-31T12:00:00Z"
std::string utc_now();

}  // namespace gyre
