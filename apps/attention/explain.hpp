#pragma once
// --explain: the plans of all ranks in words, numbers and a drawing, without running them.

#include <string>

#include "apps/attention/options.hpp"
#include "apps/attention/workload.hpp"
#include "report/app.hpp"

namespace gyre {

/// The plans of all ranks, in the directions of --pass.
struct Explanation {
  /// For one plan its steps and a table over ranks; for several a table with a row for each.
  std::string text;
  std::string svg;   ///< empty without --svg
  std::string json;  ///< gyre-plan/1; empty without --json
};
/// Explains every schedule and layout of the options. Throws a usage error that names the largest
/// --cp that works if a choice's plans of all ranks are too large for memory (some 30 million
/// entries, a few GB). Throws a usage error if every choice is refused.
Explanation explain_workload(const AttentionWorkload& workload, const AttentionOptions& o);

/// Runs --explain: prints the text on rank 0, and writes drawing and JSON. Collective.
ExitCode explain(AttentionOptions& o, AppContext& context);

}  // namespace gyre
