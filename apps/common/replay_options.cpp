#include "apps/common/replay_options.hpp"

#include <fmt/format.h>

namespace gyre {
namespace {
constexpr int max_replay_threads = 1024;
}

void declare_replay(OptionTable& table, bool& replay) {
  AddOptions(table, "Parallelism")
      .flag("--replay",
            "Run all --cp ranks in one process, one after the other: the bits of that many ranks, "
            "not their time",
            replay);
}

void refuse_in_replay(const char* option, ConfigErrors& errors) {
  errors.add("{} is about the time of ranks, which --replay does not show", option);
}

void check_replay(const ReplayRun& run, const ReportOptions& report, ConfigErrors& errors) {
  if (run.ranks != 1)
    errors.add("--replay in a run of {} ranks: one process runs them all, without mpirun",
               run.ranks);
  if (const int most = max_replay_threads / run.threads; run.cp > most)
    errors.add("--cp {} with --replay: at most {}, as each rank has {} of {} threads (--threads)",
               run.cp, most, run.threads, max_replay_threads);
  if (run.explain) errors.add("--explain shows a plan and --replay runs it: one of them, not both");
  if (run.on_gpu)
    errors.add("--replay has ranks in host memory, none on a GPU: --backend cpu, or without it");
  if (!report.at_least.empty()) refuse_in_replay("--at-least", errors);
}

std::string replay_reason(int cp) {
  return fmt::format("replayed: one process runs the {} ranks in turn", cp);
}

}  // namespace gyre
