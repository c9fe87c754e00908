#pragma once
// Presentation of the results of gyre-attention: table, report, figures of merit.

#include <string>
#include <vector>

#include "apps/attention/case.hpp"
#include "apps/attention/options.hpp"
#include "apps/attention/setup.hpp"
#include "io/schemas/attention_file.hpp"
#include "report/app.hpp"

namespace gyre {

/// Number of rows for one size of a sweep if nothing is refused.
int64_t rows_of_a_size(const AttentionOptions& o);

const Table<AttentionResult>& attention_table();

/// The kernel of the options: "cpu", "tiled", "cudnn" or "emulated".
std::string kernel_of(const AttentionOptions& o);

/// Starts a report whose configuration describes the workload and the options.
RunReport begin_attention_report(const AppContext& context, const AttentionOptions& o,
                                 const AttentionWorkload& workload, const Backend& backend);

/// Adds the figures of merit: for each direction and number of tokens, the rate of the fastest
/// result that did not fail; and the average rate.
void add_figures(RunReport& report, const std::vector<AttentionResult>& results);
/// Returns "#" lines, one for each direction and number of tokens: the fastest schedule and layout,
/// the next one, and whether the confidence intervals of their medians are apart. Empty if there
/// was only one.
std::string winners_text(const std::vector<AttentionResult>& results);

/// States the number of operations of the CUDA graphs, and whether all runs launched one.
std::string graph_text(const std::vector<AttentionResult>& results);

/// A "# peak ..." line with the measured FMA peak of a core (n/a on GPUs). Each result follows: a
/// "#" line with total, compute-only, communication-only and exposed time, and a line for each of
/// up to 64 ranks.
std::string details_text(const std::vector<AttentionResult>& results, int threads);

/// The plans of all ranks, in the directions of --pass.
struct Explanation {
  /// For one plan, tables over ranks and its steps; for several, a row for each, by direction.
  std::string text;
  std::string svg;   ///< empty without --svg
  std::string json;  ///< gyre-plan/1; empty without --json
};
/// Explains every schedule under every layout that the options choose. Plans of all ranks that are
/// too large for memory (over some 30 million entries, a few GB) are refused, with the largest --cp
/// that works. Throws a usage error if all are refused.
Explanation explain_workload(const AttentionWorkload& workload, const AttentionOptions& o,
                             bool verbose);

/// Runs --explain: prints the text on rank 0, and writes drawing and JSON. Collective.
ExitCode explain(AttentionOptions& o, AppContext& context);

/// Writes out, log-sum-exps and gradients of all tokens, after a forward and a backward pass.
/// Collective.
void write_results(OutputFile& output, AttentionRanks& subject, const std::string& input_sha256,
                   const Provenance& provenance);

}  // namespace gyre
