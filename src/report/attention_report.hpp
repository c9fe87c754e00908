#pragma once
// How gyre-attention shows what it measured.

#include <string>
#include <vector>

#include "report/attention_options.hpp"
#include "report/attention_run.hpp"
#include "report/result.hpp"
#include "report/table.hpp"

namespace gyre {

const Table<AttentionRow>& attention_table();

/// A report whose configuration says what is attended.
RunReport begin_attention_report(const AppContext& context, const AttentionOptions& o,
                                 const AttentionCase& problem);

/// Adds the row to the results, and its figure of merit.
void add_row(RunReport& report, const AttentionRow& row);

/// "# peak ..." line: what a rank could do, measured; "# overlap ..." lines, one for each row with
/// communication.
std::string overlap_text(const std::vector<AttentionRow>& rows);

}  // namespace gyre
