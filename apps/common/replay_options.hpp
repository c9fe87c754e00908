#pragma once
// --replay: one process runs all ranks of a plan, which take turns (harness/ranks.hpp).

#include <string>

#include "core/error.hpp"
#include "report/option_table.hpp"
#include "report/options.hpp"

namespace gyre {

void declare_replay(OptionTable& table, bool& replay);

/// The run, and options that do not go with --replay.
struct ReplayRun {
  int ranks = 1;  ///< of the run
  int cp = 1, threads = 1;
  bool explain = false, on_gpu = false;
};
/// Adds an error for everything that a replay cannot do, or does not show.
void check_replay(const ReplayRun& run, const ReportOptions& report, ConfigErrors& errors);
/// Adds an error: the option is about the time of ranks.
void refuse_in_replay(const char* option, ConfigErrors& errors);

/// Why the figures of a replay are not official.
std::string replay_reason(int cp);

}  // namespace gyre
