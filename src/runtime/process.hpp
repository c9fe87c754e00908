#pragma once
// Writing to standard output and standard error; states of processes.

#include <cstdint>
#include <string_view>

namespace gyre {

/// State letter of a process on this host (R, S, T: stopped, Z, ...); 0 if there is none.
char process_state(int64_t pid);

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
