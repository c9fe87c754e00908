#include "supervision/supervision.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "runtime/process.hpp"
#include "runtime/surroundings.hpp"
#include "runtime/watchdog.hpp"
#include "supervision/guard.hpp"
#include "supervision/launcher.hpp"
#include "supervision/supervisor.hpp"

namespace gyre {
namespace {

/// Replaces each closed standard stream by one that cannot be written.
void open_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(stream, F_GETFD) < 0) open("/dev/null", O_RDONLY);
}

void end_as_documented(int code, void*) {
  if (!is_exit_code(code)) _exit(static_cast<int>(ExitCode::runtime));
}

void on_abort(int) {
  write_diagnostic(program_invocation_short_name);
  write_diagnostic(": error: a library called abort()\n");
  _exit(static_cast<int>(ExitCode::runtime));
}

bool traced() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (word == "TracerPid:") return status >> word && word != "0";
  return false;
}

/// Whether this is rank 0 of its host, as numbered by Hydra or Slurm; without a number, true.
bool first_of_host() {
  for (const char* name : {"MPI_LOCALRANKID", "SLURM_LOCALID"})
    if (const char* number = std::getenv(name)) return std::atoi(number) == 0;
  return true;
}

/// Value of the timeout option. It is needed from the start, before the options are parsed; if it
/// is given in another way or is invalid, the default applies.
double timeout_of(int argc, char** argv) {
  double seconds = default_timeout_seconds;
  const size_t length = std::strlen(timeout_option);
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], timeout_option, length) != 0) continue;
    if (argv[i][length] == '=')
      seconds = std::atof(argv[i] + length + 1);
    else if (argv[i][length] == '\0' && i + 1 < argc)
      seconds = std::atof(argv[i + 1]);
  }
  return seconds;
}

}  // namespace

void prepare_process() {
  open_standard_streams();
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGCHLD, SIG_DFL);
  on_exit(end_as_documented, nullptr);
}

void start_supervised(std::string_view program, int argc, char** argv) {
  static bool started = false;
  if (std::exchange(started, true)) return;
  surroundings().end_run = [](int code) {
    wait_for_launcher_to_read();
    end_run_through_launcher(code);
  };
  const bool launched = std::getenv("PMI_RANK") != nullptr;
  const bool alone = runs_alone();
  // A supervisor reports which signal has ended its rank.
  if (!launched || alone) std::signal(SIGABRT, on_abort);
  if (alone) return;
  start_guard(argc, argv, launched && first_of_host());
  if (launched) fork_supervised(program, timeout_of(argc, argv));
}

bool runs_alone() {
  static const bool alone = [] {
    const char* text = std::getenv("GYRE_SUPERVISE");
    const std::string_view value = text != nullptr ? text : "1";
    if (value != "0" && value != "1")
      throw_usage("GYRE_SUPERVISE={} in the environment; wanted: 0 or 1", value);
    return value == "0" || traced();
  }();
  return alone;
}

}  // namespace gyre
