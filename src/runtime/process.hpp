#pragma once
// Prepares a process, and writes to its standard output and standard error.

#include <string_view>

namespace gyre {

/// Call it first of all in main. Afterwards
/// - a write to a pipe without a reader, or beyond `ulimit -f`, fails with its errno and sends no
///   signal; children can be waited for, whatever the parent of this process ignores;
/// - a standard stream that was closed is open and cannot be written: no other file gets its
/// number;
/// - a library that ends the process by exit() with a code that no ExitCode has, as MPI does when
///   MPI_Init fails, ends it with ExitCode::runtime; without a launcher abort() does, too.
void prepare_process();

/// Writes `text` to standard error. What cannot be written is dropped; when nobody reads a full
/// pipe, after `patience_ms` (negative: never). No errors, no locks, no memory: it may be called in
/// a signal handler.
void write_diagnostic(std::string_view text, int patience_ms = 2000);

/// Writes `text` to standard output. An error is kept: nothing is written behind it.
void write_stdout(std::string_view text);

/// The errno of the first error of write_stdout(); 0: there was none.
int stdout_error();

/// Writes all of `text` to a descriptor and waits as long as it takes. Returns 0 or the errno.
int write_all(int descriptor, std::string_view text);

}  // namespace gyre
