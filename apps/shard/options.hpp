#pragma once
// Options of gyre-shard.

#include <string>
#include <vector>

#include "apps/common/array_output.hpp"
#include "apps/common/registry_options.hpp"
#include "apps/shard/batch.hpp"
#include "apps/shard/report.hpp"
#include "harness/backend.hpp"
#include "report/app.hpp"
#include "report/options.hpp"

namespace gyre {

/// Options of gyre-shard; see --help.
struct ShardOptions {
  std::string input, generate, output, yours, svg, check = "last", algorithm;
  LayoutChoice layout;
  int cp = 2;
  AttentionShape attention;
  int64_t capacity = 0, bin = 0;
  bool repad = false;
  std::string mask, gradient;  ///< mask "": the one that shards keep; gradient "": no check
  std::string relayout;        ///< "": no check
  bool ulysses = false;
  BatchOptions batch;
  ReportOptions report;
  BackendOptions backend;

  ShardOptions() { layout.name = "all"; }
  ArrayPaths files() const { return {output, yours}; }
  LayoutOptions layout_options() const {
    LayoutOptions options = layout.for_ranks(cp);
    options.time = attention.time_model();  // unless --pairs-per-key says what layouts weigh
    return options;
  }
};

void declare_options(OptionTable& table, ShardOptions& o);

/// Names of the figures of merit of a run with these options.
std::vector<std::string> metrics_of(const ShardOptions& o);

/// Throws a usage error that lists all errors of the options.
void check_options(const ShardOptions& o);
/// Throws a usage error for options of packed streams that are given with a gyre/bshd file.
void check_batch_options(const ShardOptions& o);

/// Shards a batch of rows (gyre/bshd) over the ranks of --cp. Collective.
ExitCode run_batch(const ShardOptions& o, AppContext& context);

/// Runs Ulysses on packed streams over the ranks of the run. Collective.
ExitCode run_heads_for_tokens(const ShardOptions& o, const PackedHeader& header,
                              const PackedSlots& slots, AppContext& context, RunReport& report);

}  // namespace gyre
