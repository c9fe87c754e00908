#pragma once
// Options of gyre-logprobs.

#include <string>
#include <vector>

#include "apps/common/registry_options.hpp"
#include "apps/common/workload_options.hpp"
#include "comm/process_grid.hpp"
#include "core/pass.hpp"
#include "harness/backend.hpp"
#include "logprobs/operations/operation.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_partition.hpp"
#include "report/options.hpp"
#include "sharding/distributed.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

inline constexpr const char* gather_gradient_option = "--gather-gradient";
inline constexpr const char* f32_output_option = "--f32-output";

/// Options of gyre-logprobs; see --help.
struct LogprobsOptions {
  std::string input, generate, op, method = "gyre", shards, dtype = "f32", pass = "both",
                                   check = "last", ties = "exact", output;
  int tp = 0, cp = 0, sequences = 1, threads = 1, warmup = 1;
  TokenSweep sweep = {512};
  RepeatOptions repeats;
  ReportOptions report;
  int64_t capacity = 0, vocab = 32768, padded = 0, picks = 64, hidden = 128, top_k = 0,
          list_length = 64, chunk = 0, peaks = 32, seed = 1, check_tokens = 64;
  double temperature = 1, top_p = 0.9, min_p = 0, logit_scale = 1, peak_height = 12,
         zero_fraction = 0, tol_scale = 1;
  std::vector<double> parameters;  ///< those of row_parameters()
  std::string gather_gradient;     ///< empty: not given
  bool in_place = true, list = false, f32_output = false, filter_per_token = false;
  bool op_is_given = true;  ///< set by check_options(), which completes `op`
  BackendOptions backend;
  LayoutChoice layout;

  LogprobsOptions();

  DType type() const { return activation_type(dtype); }
  /// Type of (log-)softmax results.
  DType output_type() const { return f32_output ? DType::f32 : type(); }
  SamplingFilter filter() const { return {top_k, top_p, temperature, min_p}; }
  LayoutOptions layout_options() const { return layout.for_ranks(cp); }
  /// The columns of each rank, from --shards, --padded and --tp.
  VocabPartition partition() const;
  GatherGradient gather_convention() const;
  /// Passes to time. A backward-only run also does forward, untimed.
  std::vector<Pass> passes() const;
  /// The parameters of one operation, in its order.
  std::vector<double> parameters_of(const RowOperation& operation) const;
  bool wants(const std::string& op_name) const { return lists(op, op_name); }
  bool wants_method(const std::string& name) const { return lists(method, name); }
};

void declare_options(OptionTable& table, LogprobsOptions& o);

/// Fills in options that were left open. Throws a usage error that lists everything that is wrong
/// with the options in a run of `ranks` ranks, with the nearest valid values.
void check_options(LogprobsOptions& o, int ranks);

/// A "# note" line that names the operations of the run that have no upstream method although
/// --method asks for it; "" if there are none.
std::string method_note(const LogprobsOptions& o);

/// One line per operation, with its methods and summary, and one line per layout.
std::string operation_help();

}  // namespace gyre
