#pragma once
// --explain: the plans of all ranks in words, numbers and a drawing, without running them.

#include <string>

#include "apps/attention/options.hpp"
#include "apps/attention/workload.hpp"
#include "report/app.hpp"

namespace gyre {

/// The plans of all ranks, in the directions of --pass.
struct Explanation {
  std::string text;
  std::string svg;  ///< empty without --svg
};
/// Throws a usage error that names the largest --cp that works if the plans of all ranks are too
/// large for memory (some 30 million entries, a few GB).
Explanation explain_workload(const AttentionWorkload& workload, const AttentionOptions& o);

/// What --explain does: prints the text on rank 0, and writes the drawing. Collective.
ExitCode explain(const AttentionOptions& o, AppContext& context);

}  // namespace gyre
