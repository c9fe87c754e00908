#pragma once
// Process setup, and writing to standard output and standard error.

#include <string>
#include <string_view>
#include <vector>

namespace gyre {

/// Must be the first call in main. Afterwards
/// - a write to a pipe without a reader, or beyond `ulimit -f`, fails with its errno and raises no
///   signal; children can be waited for, whatever the parent process ignores;
/// - a closed standard stream is open but cannot be written, so no other file gets its number;
/// - if a library calls exit() with a code that is no ExitCode, as MPI does if MPI_Init fails, the
///   process ends with ExitCode::runtime; without a launcher the same holds for abort().
void prepare_process();

/// A process that acts when this one has ended, or was killed.
struct Guard {
  int pipe = -1;  ///< the guard acts when all processes have closed it; -1: there is no guard
  int error = 0;  ///< errno if it could not be started; 0 on a machine without a shell
};

/// Starts a shell that runs `script` with `arguments` when this process and its forks have ended in
/// any way, including SIGKILL. It is detached from the process group and holds no open files.
Guard start_guard(std::string name, const std::string& script, std::vector<std::string> arguments);

/// Writes `text` to standard error. Drops text that cannot be written, and after `patience_ms`
/// (negative: never) text that nobody reads from a full pipe. Reports no errors and uses no locks
/// or allocation, so signal handlers may call it.
void write_diagnostic(std::string_view text, int patience_ms = 2000);

/// Writes `text` to standard output. After the first error, which is kept, writes nothing more.
void write_stdout(std::string_view text);

/// errno of the first error of write_stdout(); 0 if there was none.
int stdout_error();

/// Writes all of `text` to a descriptor, without a time limit. Returns 0 or the errno.
int write_all(int descriptor, std::string_view text);

}  // namespace gyre
