#pragma once
// How gyre-attention shows what it measured.

#include <string>
#include <vector>

#include "apps/attention/options.hpp"
#include "apps/attention/run.hpp"
#include "report/result.hpp"
#include "report/table.hpp"

namespace gyre {

const Table<AttentionResult>& attention_table();

/// The kernel that --kernel stands for: "cpu", "tiled" or "cudnn".
std::string kernel_of(const AttentionOptions& o);
/// That kernel, on a stream made for the backend of the options.
std::unique_ptr<BlockKernel> make_kernel(const AttentionOptions& o, Stream& stream);

/// A report whose configuration says what is attended.
RunReport begin_attention_report(const AppContext& context, const AttentionOptions& o,
                                 const AttentionWorkload& problem, const Backend& backend);

/// Adds the row to the results.
void add_row(RunReport& report, const AttentionResult& row);

/// Figures of merit: for each direction and number of tokens, the rate of the fastest row.
void add_figures(RunReport& report, const std::vector<AttentionResult>& rows);

/// "# peak ..." line: what a core could do, measured; n/a on GPUs.
std::string peak_text(const AttentionResult& row, int threads);

/// How the time of a row came about: a "#" line with total, compute only, communication only and
/// what is exposed; then a line for each of up to 64 ranks.
std::string details_text(const AttentionResult& row);

}  // namespace gyre
