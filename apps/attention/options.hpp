#pragma once
// Options of gyre-attention.

#include <string>
#include <vector>

#include "apps/common/backend.hpp"
#include "apps/common/layout_options.hpp"
#include "apps/common/schedule_options.hpp"
#include "report/options.hpp"
#include "report/sweep.hpp"

namespace gyre {

/// Options of gyre-attention; see --help.
struct AttentionOptions {
  std::string input, generate, pass = "both", mask = "causal", dtype = "f32", partial_out = "f32",
                               partial_dq = "f32", wire_dkv, kernel = "auto", check = "last",
                               network, trace, svg, output, json, csv;
  ScheduleChoice schedule;
  LayoutChoice layout;
  int cp = 0, heads = 8, kv_heads = 8, head_dim = 64, batch = 1, threads = 1, iterations = 5,
      warmup = 1;
  int64_t tokens = 4096, min_tokens = 0, max_tokens = 0, capacity = 0, window = 0, seed = 1,
          check_pairs = int64_t{1} << 18;
  double factor = 2, tol_scale = 1, tflops = 0.1, gbytes_per_s = 5, latency_us = 10;
  bool sinks = false, explain = false;
  BackendOptions backend;

  HeadShape head_shape() const;
  MaskRule mask_rule() const;
  ElementTypes types() const;
  ScheduleOptions schedule_options() const { return schedule.options; }
  LayoutOptions layout_options() const { return layout.for_ranks(cp); }
  /// Both, forward or backward only. Backward needs a forward, which is then not timed.
  std::vector<Pass> passes() const;
  TokenSweep sweep() const { return {tokens, min_tokens, max_tokens, factor}; }
  bool sweeps() const { return sweep().sweeps(); }
  /// Tokens of a sequence.
  std::vector<int64_t> sizes() const { return sweep().sizes(); }
};

void declare_options(CLI::App& app, AttentionOptions& o);

/// Fills in what was left to be chosen; throws a usage error that lists everything that is wrong
/// with the options in a run of `ranks` ranks.
void check_options(AttentionOptions& o, int ranks);

}  // namespace gyre
