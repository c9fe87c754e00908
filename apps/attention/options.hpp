#pragma once
// Options of gyre-attention.

#include <string>
#include <vector>

#include "apps/common/registry_options.hpp"
#include "apps/common/workload_options.hpp"
#include "harness/backend.hpp"
#include "report/options.hpp"

namespace gyre {

/// Options of gyre-attention; see --help.
struct AttentionOptions {
  std::string input, generate, pass = "both", dtype = "f32", partial_out = "f32",
                               partial_dq = "f32", wire_dkv, kernel = "auto", check, network,
                               compute, trace, svg, output;
  MaskOptions mask;
  ScheduleChoice schedule;
  LayoutChoice layout;
  int cp = 0, heads = 8, kv_heads = 8, head_dim = 64, v_head_dim = 0, shared_key_dim = 0, batch = 1,
      threads = 1, warmup = 1;
  TokenSweep sweep = {4096};
  int64_t capacity = 0, seed = 1, check_pairs = int64_t{1} << 18;
  RepeatOptions repeats;
  ReportOptions report;
  double tol_scale = 1, tflops = 0.1, gbytes_per_s = 5, latency_us = 10;
  bool sinks = false, explain = false, deterministic = false, cuda_graph = false, replay = false,
       automatic = false;
  BackendOptions backend;

  /// Ranks of the plan that a process runs.
  int ranks_here() const { return replay ? cp : 1; }
  bool emulates_compute() const { return !compute.empty(); }
  HeadShape head_shape() const;
  ElementTypes types() const;
  ScheduleOptions schedule_options() const { return schedule.options; }
  LayoutOptions layout_options() const { return layout.for_ranks(cp); }
  /// Passes to time: both, or one of them. A backward alone follows an untimed forward.
  std::vector<Pass> passes() const;
};

void declare_options(OptionTable& table, AttentionOptions& o);

/// Fills in defaults. Throws a usage error that lists all problems of the options in a run of
/// `ranks` ranks.
void check_options(AttentionOptions& o, int ranks);

}  // namespace gyre
