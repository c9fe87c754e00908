#pragma once
// Presentation of the results of gyre-attention: table, report, figures of merit.

#include <string>
#include <vector>

#include "apps/attention/case.hpp"
#include "apps/attention/options.hpp"

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
/// result.
void add_figures(RunReport& report, const std::vector<AttentionResult>& results);

/// States the number of operations of the CUDA graphs, and whether all runs launched one.
std::string graph_text(const std::vector<AttentionResult>& results);

/// A "# peak ..." line with the measured FMA peak of a core (n/a on GPUs). Each result follows: a
/// "#" line with total, compute-only, communication-only and exposed time, and a line for each of
/// up to 64 ranks.
std::string details_text(const std::vector<AttentionResult>& results, int threads);

}  // namespace gyre
