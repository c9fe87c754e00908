#pragma once
// How gyre-logprobs shows what it measured.

#include <map>
#include <set>
#include <string>
#include <vector>

#include "apps/logprobs/run.hpp"
#include "report/answers.hpp"
#include "report/result.hpp"
#include "report/table.hpp"

namespace gyre {

/// The independent variables of a row.
Fields key_of(const LogprobsResult& row);

const Table<LogprobsResult>& logprobs_table();

/// A report whose configuration says what is scored.
RunReport begin_logprobs_report(const AppContext& context, const LogprobsOptions& o,
                                const LogprobsWorkload& problem);

/// Adds the row to the results.
ResultEntry entry_of(const LogprobsResult& row);

/// Figures of merit: our rates, of the operations whose entries say so, and how many times faster
/// than upstream's algorithms ours are.
void add_figures(RunReport& report, const std::vector<LogprobsResult>& rows);

/// Reasons for which operations did not run, by name.
using Refusals = std::map<std::string, std::string>;
/// Says for each array of the file's answers whether it was compared, or why not. `compared` names
/// the arrays that results were compared with.
std::vector<AnswerUse> answer_uses(const LogprobsFile& file, const LogprobsOptions& o,
                                   const std::set<std::string>& compared, const Refusals& refused);

/// "# memory ..." line: what a rank's memory and cores can do, all ranks at once.
std::string rates_text(const MachineRates& rates);
/// A "#" line where shards are too small for rates to say anything; else nothing.
std::string smallness_text(const MachineRates& rates, int64_t tokens);

/// A "#" line of what the table has no column for.
std::string details_text(const LogprobsResult& row);

/// Writes the results that ranks have collected. Collective.
void write_results(OutputFile& output, const std::vector<LogprobsPart>& mine,
                   const LogprobsContext& context, const std::string& input_sha256,
                   const Provenance& provenance);

}  // namespace gyre
