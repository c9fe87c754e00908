#pragma once
// Results, tables and reports of gyre-logprobs.

#include <map>
#include <set>
#include <string>
#include <vector>

#include "apps/logprobs/operation.hpp"
#include "harness/row.hpp"
#include "machine/rates.hpp"
#include "report/result.hpp"

namespace gyre {

/// Measured result of one pass of an operation by one method. Messages are counted per call.
struct LogprobsResult : MeasuredRow {
  std::string op, method;
  Pass pass = Pass::forward;
  int64_t tokens = 0, vocab = 0;
  double ideal_bytes = 0;   ///< maximum over ranks; NaN if negligible
  double limit = 0;         ///< rate limit of memory (bytes/s) or cores (FLOP/s)
  int64_t extra_bytes = 0;  ///< memory beyond inputs and outputs, maximum over ranks
  std::string note;

  double gbytes_per_s() const { return ideal_bytes / time_ms.median / 1e6; }
  /// `flops` is the maximum over ranks; NaN if memory traffic is the limit.
  double tflops_per_rank() const { return flops / time_ms.median / 1e9; }
  double share_of_limit() const;
  std::vector<std::tuple<std::string, Value, std::string>> further() const {
    return {{"ideal_bytes", ideal_bytes, "B"},
            {"flop_rate", tflops_per_rank(), "TF/s/rank"},
            {"share_of_limit", share_of_limit(), ""}};
  }
};

/// The rows of a run, with their keys. `cycle` counts repetitions of the sweep, from 1.
std::vector<LogprobsResult> rows_of(const LogprobsRun& run, const LogprobsOptions& o,
                                    const LogprobsWorkload& problem, int cycle);

/// Fills in the traffic, memory, limit and note of a measured operation. `memory_before` is the
/// bytes in use before start(). Collective over `world`.
void complete(LogprobsResult& row, const LogprobsOp& op, const LogprobsRun& run,
              int64_t memory_before, const MachineRates& rates, bool in_place, Communicator& world);

const Table<LogprobsResult>& logprobs_table();

/// Begins a report with the configuration of the workload.
RunReport begin_logprobs_report(const AppContext& context, const LogprobsOptions& o,
                                const LogprobsWorkload& problem);

/// Figures of merit: rates of the operations whose entries ask for them, speedups over upstream's
/// algorithms, and averages of rates.
std::vector<Fom> figures_of(const std::vector<LogprobsResult>& rows);
/// Names of the figures that a run with these options has when it measures several sizes.
std::vector<std::string> metrics_of(const LogprobsOptions& o);

/// Value of --op for the operations with an answer in the file; "" without answers.
std::string answered_operations(const LogprobsFile& file);

/// Why operations did not run, by operation name.
using Refusals = std::map<std::string, std::string>;
/// Returns for each answer array of the file whether it was compared, or why not. `compared` names
/// the arrays that results were compared with.
std::vector<AnswerUse> answer_uses(const LogprobsFile& file, const LogprobsOptions& o,
                                   const std::set<std::string>& compared, const Refusals& refused);

/// A "#" line with the memory and FMA rates of a rank while all ranks run.
std::string rates_text(const MachineRates& rates);
/// A "#" line that warns if shards are too small for rates to be meaningful, else "".
std::string smallness_text(const MachineRates& rates, int64_t tokens);

/// A "#" line of results that have no column in the table.
std::string details_text(const LogprobsResult& row);

/// Writes the results that all ranks have collected. Collective.
void write_results(OutputFile& output, const std::vector<LogprobsPart>& mine,
                   const LogprobsContext& context, const std::string& input_sha256,
                   const Provenance& provenance);

}  // namespace gyre
