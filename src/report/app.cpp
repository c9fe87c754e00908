#include "report/app.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <atomic>
#include <cstdio>
#include <exception>
#include <new>

#include "comm/agree.hpp"
#include "comm/checked.hpp"
#include "comm/mpi.hpp"
#include "core/version.hpp"
#include "io/h5.hpp"
#include "io/schemas/schema_names.hpp"
#include "report/command_line.hpp"
#include "report/options.hpp"
#include "report/progress.hpp"
#include "report/row_log.hpp"
#include "runtime/features.hpp"
#include "runtime/process.hpp"
#include "runtime/watchdog.hpp"
#include "supervision/supervision.hpp"

namespace gyre {
namespace {

std::string version_text(const std::string& name) {
  const BuildInfo build = build_info();
  const char* cuda = software_gpu ? "for the software GPU"
                     : with_cudnn ? "with CUDA, NCCL and cuDNN"
                     : with_cuda  ? "with CUDA and NCCL"
                                  : "without CUDA";
  return fmt::format("{} {}\ngit {} ({})\n{} build by {}, {}\n{}\n", name, build.version,
                     build.git_sha, build.git_state, build.build_type, build.compiler, cuda,
                     MpiEnvironment::library_version());
}

std::vector<std::string> arguments_without_folder(int argc, char** argv) {
  std::vector<std::string> arguments(argv, argv + argc);
  if (!arguments.empty()) arguments[0] = arguments[0].substr(arguments[0].rfind('/') + 1);
  return arguments;
}

/// Joins arguments with blanks and quotes those that a shell would interpret.
std::string join_quoted(const std::vector<std::string>& arguments) {
  std::string line;
  for (const std::string& argument : arguments) {
    const bool plain = !argument.empty() &&
                       argument.find_first_of(" \t\n'\"\\$&|;<>()*?[]#~`!{}") == std::string::npos;
    std::string quoted = argument;
    for (size_t at = quoted.find('\''); at != std::string::npos; at = quoted.find('\'', at + 4))
      quoted.replace(at, 1, "'\\''");
    line += (line.empty() ? "" : " ") + (plain ? quoted : "'" + quoted + "'");
  }
  return line;
}

void refuse_foreign_launcher(const MpiEnvironment& mpi) {
  if (mpi.launched_ranks() <= 1 || mpi.size() != 1) return;
  throw_runtime(
      "the launcher started {} ranks, but this program's MPI ({}) sees only one; "
      "start it with the launcher of that MPI "
      "(Debian: mpiexec.mpich, or srun --mpi=pmi2; srun --mpi=list names what there is)",
      mpi.launched_ranks(), MpiEnvironment::library_version());
}

/// Runs everything between the start and the end of MPI. run_app handles its exceptions.
ExitCode run(int argc, char** argv, const AppInfo& info, MpiEnvironment& mpi, Communicator& world,
             const std::function<void(OptionTable&)>& declare,
             const std::function<ExitCode(AppContext&)>& body) {
  refuse_foreign_launcher(mpi);
  OptionTable options(info.description, info.name);
  CLI::App& app = options.parser();
  app.footer(info.footer);
  CommonOptions common;
  std::string machine;
  Request request = Request::run;
  run_agreed(world, "reading the options", [&] {
    app.set_help_flag("");
    declare(options);
    declare_common(options, common);
    if (info.takes_machine) declare_machine_option(options, machine);
    request = parse_command_line(options, argc, argv);
  });
  if (request != Request::run) {
    const std::string text = request == Request::help ? app.help() : version_text(info.name);
    if (world.rank() == 0) write_stdout(text);
    return ExitCode::ok;
  }
  Watchdog::set_timeout(common.timeout_seconds);
  Outputs outputs(world);
  RowLog rows(world);
  Progress progress(info.name, common.progress, world.rank() == 0 && !common.quiet);
  set_note_handler([shows = world.rank() == 0 && !common.quiet](const std::string& note) {
    if (shows) write_stdout(fmt::format("# note: {}\n", note));
  });
  const std::vector<std::string> arguments = arguments_without_folder(argc, argv);
  AppContext context{.info = info,
                     .mpi = mpi,
                     .world = world,
                     .arguments = arguments,
                     .command_line = join_quoted(arguments),
                     .outputs = outputs,
                     .rows = rows,
                     .progress = progress,
                     .options = options,
                     .verbose = common.verbose,
                     .quiet = common.quiet,
                     .machine = read_machine_file(world, machine)};
  return agree_on(world, body(context));
}

/// "NAME: error on rank 2 (HOST): ", for on_uncaught(), which takes no arguments.
std::string message_start;

/// Ends all ranks after an error that may have occurred only on this rank. Does not allocate.
[[noreturn]] void end_all_ranks(ExitCode code, const char* message) {
  std::array<char, 4096> line;  // one write: lines of several ranks do not mix
  const int size =
      std::snprintf(line.data(), line.size(), "%s%s\n", message_start.c_str(), message);
  if (size < std::ssize(line))
    write_diagnostic(line.data());
  else
    for (const char* part : {message_start.c_str(), message, "\n"}) write_diagnostic(part);
  MpiEnvironment::abort(static_cast<int>(code));
}

/// The std::terminate handler, for uncaught exceptions. The first thread here ends all ranks.
[[noreturn]] void on_uncaught() {
  static std::atomic<bool> ending = false;
  while (ending.exchange(true)) pause();
  try {
    if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
    end_all_ranks(ExitCode::runtime, "std::terminate() was called");
  } catch (const Error& error) {
    end_all_ranks(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    end_all_ranks(ExitCode::runtime, "there is no memory left");
  } catch (const std::exception& error) {
    end_all_ranks(ExitCode::runtime, error.what());
  } catch (...) {
    end_all_ranks(ExitCode::runtime, "an exception of unknown type");
  }
}

}  // namespace

void plan_outputs(AppContext& context) {
  RunFiles files;
  run_agreed(context.world, "options", [&] { files = context.options.files(); });
  context.outputs.plan(files);
}

int run_app(int argc, char** argv, const AppInfo& info,
            const std::function<void(OptionTable&)>& declare,
            const std::function<ExitCode(AppContext&)>& body) {
  prepare_process();
  message_start = info.name + ": error: cannot start: ";
  std::set_terminate(on_uncaught);
  start_supervised(info.name, argc, argv);
  h5::initialise();
  MpiEnvironment mpi(argc, argv, info.name);
  message_start = fmt::format("{}: error on rank {} ({}): ", info.name, mpi.rank(),
                              mpi.peers()[mpi.rank()].host);
  try {
    CheckedCommunicator world(make_mpi_communicator(mpi.world()));
    ExitCode code = ExitCode::ok;
    const auto work = [&] {
      code = run(argc, argv, info, mpi, world, declare, body);
      require_stdout();
    };
    mpi.size() == 1 ? run_agreed(world, "the run", work) : work();
    return static_cast<int>(code);
  } catch (const AgreedError& error) {
    if (mpi.rank() == 0) write_diagnostic(fmt::format("{}: error: {}\n", info.name, error.what()));
    return static_cast<int>(error.code());
  }
}

Provenance provenance_of(const AppContext& context, const std::string& sources) {
  const BuildInfo build = build_info();
  return {{"generator", fmt::format("{} {} (git {}, {})", context.info.name, build.version,
                                    build.git_sha, build.git_state)},
          {"command", context.command_line},
          {"sources", sources}};
}

void declare_report_options(OptionTable& table, ReportOptions& options,
                            const std::vector<std::string>& metrics) {
  options.metrics = metrics;
  const AddOptions add(table, "Output");
  add("-J,--json",
      "Write the result here (gyre-result/1). "
      "FILE.jsonl: a line a row, appended as soon as it is measured",
      options.json)
      .writes_text()
      .is_text = [&options] { return !options.in_lines(); };
  add("--csv", "Write the table here, with all columns", options.csv).writes_text();
  add.choice("--resume",
             "With -J FILE.jsonl: leave out rows that it has of the same run; all that are "
             "finished and right, or only those whose timing meets the run rules",
             options.resume, {"none", "finished", "measured"});
  add("--columns", "Columns of the table: default, all, or names with commas between them",
      options.columns);
  add("--at-least",
      "METRIC=VALUE: exit code 1 if a figure of merit (FOM) of this name is below the value",
      options.at_least);
}

void refuse_report_options(const AppContext& context, std::string_view mode, bool json) {
  ConfigErrors errors;
  for (const char* flag : {"--json", "--csv", "--resume", "--columns", "--at-least", "--machine"})
    if (context.options.at(flag).is_given() && (json || flag != std::string_view("--json")))
      errors.add("{} goes with a run, not with {}", flag, mode);
  errors.throw_if_any("impossible configuration");
}

}  // namespace gyre
