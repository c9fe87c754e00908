#pragma once
// Options of gyre-recurrence.

#include <string>
#include <vector>

#include "apps/common/registry_options.hpp"
#include "core/pass.hpp"
#include "harness/backend.hpp"
#include "predict/machine.hpp"
#include "recurrence/schedules/schedule.hpp"
#include "report/options.hpp"
#include "report/repeat.hpp"

namespace gyre {

/// Options of gyre-recurrence; see --help.
struct RecurrenceOptions {
  RecurrenceOptions();

  std::string input, generate, kind, schedule, pass = "both", dtype = "f32", check = "last", output,
                                               network;
  LayoutChoice layout;
  int cp = 0, heads = 8, key_heads = 8, key_dim = 64, value_dim = 64, conv = 0, batch = 1,
      threads = 1, warmup = 1;
  TokenSweep sweep = {4096};
  int64_t capacity = 0, seed = 1, check_tokens = int64_t{1} << 15;
  RepeatOptions repeats;
  ReportOptions report;
  double tol_scale = 1, tflops = 0.1, gbytes_per_s = 5, latency_us = 10;
  bool explain = false, replay = false;
  BackendOptions backend;

  DType type() const;
  /// Ranks of the plan that a process runs.
  int ranks_here() const { return replay ? cp : 1; }
  /// The machine of --explain.
  MachineModel machine() const;
  /// Passes to time: both, or one of them. A backward alone follows an untimed forward.
  std::vector<Pass> passes() const;
  /// Whether several kinds, schedules, layouts or sizes are run.
  bool has_many() const;
};

void declare_options(OptionTable& table, RecurrenceOptions& o);

/// Fills in defaults. Throws a usage error that lists all problems of the options in a run of
/// `ranks` ranks.
void check_options(RecurrenceOptions& o, int ranks);

}  // namespace gyre
