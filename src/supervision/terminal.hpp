#pragma once
// The terminal that shows a rank's standard error.

namespace gyre {

/// Columns of the terminal that shows this process's standard error: its own, or that of the
/// launcher, if one on this host passes it on. 0: no terminal.
int stderr_columns();

}  // namespace gyre
