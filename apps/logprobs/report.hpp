#pragma once
// How gyre-logprobs shows what it measured.

#include <map>
#include <set>
#include <string>
#include <vector>

#include "apps/logprobs/operation.hpp"
#include "harness/row.hpp"
#include "machine/rates.hpp"
#include "report/answers.hpp"

namespace gyre {

/// An operation by one method in one direction, measured. Its messages are those of a call.
struct LogprobsResult : MeasuredRow {
  std::string op, method;
  Pass pass = Pass::forward;
  int64_t tokens = 0, vocab = 0;
  double ideal_bytes = 0;   ///< of the rank that has most; NaN: hardly any
  double limit = 0;         ///< what memory can do of this kind, bytes/s, or cores, FLOP/s
  int64_t extra_bytes = 0;  ///< beyond inputs and outputs, of the rank that has most
  std::string note;

  double gbytes_per_s() const { return ideal_bytes / time_ms.median / 1e6; }
  /// `flops` are of the rank that has most; NaN: bytes are what counts.
  double tflops_per_rank() const { return flops / time_ms.median / 1e9; }
  double share_of_limit() const;
  std::vector<std::tuple<std::string, Value, std::string>> further() const {
    return {{"ideal_bytes", ideal_bytes, "B"},
            {"flop_rate", tflops_per_rank(), "TF/s/rank"},
            {"share_of_limit", share_of_limit(), ""}};
  }
};

/// The rows of a run, with their keys; `cycle`: how often the sweep has been run.
std::vector<LogprobsResult> rows_of(const LogprobsRun& run, const LogprobsOptions& o,
                                    const LogprobsWorkload& problem, int cycle);

/// Fills in what a measured operation says of itself; `memory_before`: bytes in use before it was
/// started. Collective over `world`.
void complete(LogprobsResult& row, const LogprobsOp& op, const LogprobsRun& run,
              int64_t memory_before, const MachineRates& rates, bool in_place, Communicator& world);

const Table<LogprobsResult>& logprobs_table();

/// A report whose configuration says what is scored.
RunReport begin_logprobs_report(const AppContext& context, const LogprobsOptions& o,
                                const LogprobsWorkload& problem);

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
