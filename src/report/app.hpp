#pragma once
// The common frame of every mini-app: MPI, options, errors, exit code.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "core/error.hpp"
#include "io/outputs.hpp"
#include "io/schemas/schema.hpp"
#include "report/machine_report.hpp"
#include "report/option_table.hpp"
#include "runtime/mpi_env.hpp"

namespace gyre {

class Progress;
class RowLog;
struct ReportOptions;

struct AppInfo {
  std::string name;           ///< "gyre-pipeline"
  std::string description;    ///< one sentence, shown by --help
  std::string footer;         ///< examples, shown by --help
  bool takes_machine = true;  ///< has the option --machine; results name the machine
};

/// Arguments of the body of an app.
struct AppContext {
  const AppInfo& info;
  MpiEnvironment& mpi;
  Communicator& world;
  std::vector<std::string> arguments;  ///< argv; the program without its folder
  std::string command_line;            ///< `arguments` as one text
  Outputs& outputs;
  RowLog& rows;
  Progress& progress;
  const OptionTable& options;
  bool verbose = false;
  bool quiet = false;
  std::shared_ptr<const MachineFile> machine = nullptr;  ///< from --machine
  bool root() const { return world.rank() == 0; }
};

/// Plans the outputs of a run (Outputs::plan): the files that its options read and write. To be
/// called before a file is written, and after the options were checked. Collective.
void plan_outputs(AppContext& context);

/// Runs an app: starts MPI, lets `declare` add options to the common ones (--config, --timeout, -v,
/// -q, --version, -h), parses, runs `body`, and returns the exit code that all ranks agree on.
///
/// --help and --version print on rank 0 and exit with 0. Unknown or malformed options print the
/// reason, the nearest valid option and a hint at --help on rank 0's stderr and exit with 2. Only
/// rank 0 writes to stdout.
///
/// An AgreedError, or any exception in a world of one rank, is printed once as "NAME: error: ...",
/// and all ranks exit in order. No other exception is caught. std::terminate prints rank and host
/// and ends all ranks through MpiEnvironment::abort. A handler here would run after the destructors
/// on the stack. Some of them wait for the other ranks, which know of no error. An exception
/// without a handler unwinds nothing, so destructors need not know why they are called.
int run_app(int argc, char** argv, const AppInfo& info,
            const std::function<void(OptionTable&)>& declare,
            const std::function<ExitCode(AppContext&)>& body);

/// Attributes of an output file: generator (program, version, git), command and `sources`.
Provenance provenance_of(const AppContext& context, const std::string& sources);

struct ReportOptions {
  std::string json;  ///< result file, or ""; NAME.jsonl: a line per row, written when measured
  std::string csv;
  std::string resume = "none";       ///< "finished" or "measured": which rows of `json` are kept
  std::string columns = "default";   ///< "default", "all" or comma-separated names
  std::string at_least;              ///< "METRIC=VALUE", or "": figures of merit below it fail
  std::vector<std::string> metrics;  ///< names of the figures of merit that the app makes

  bool in_lines() const { return json.ends_with(".jsonl"); }
};

/// Adds -J,--json, --csv, --resume, --columns and --at-least, which takes one of `metrics`.
void declare_report_options(OptionTable& table, ReportOptions& options,
                            const std::vector<std::string>& metrics);

/// Throws a usage error that names each of these options, and --machine, that is given, because
/// `mode` ("--explain") measures nothing; without `json`, --json may be. All ranks throw the same
/// error.
void refuse_report_options(const AppContext& context, std::string_view mode, bool json = true);

}  // namespace gyre
