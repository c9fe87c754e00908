#pragma once
// One operation of gyre-logprobs: made, measured, counted, verified.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "apps/logprobs/operation.hpp"
#include "machine/rates.hpp"
#include "report/repeat.hpp"

namespace gyre {

/// An operation by one method in one direction, measured.
struct LogprobsResult {
  std::string op, method;
  Pass pass = Pass::forward;
  int64_t tokens = 0, vocab = 0;
  int tp = 1, cp = 1;
  int cycle = 1;            ///< of how many times the sweep was run
  Timing timing;            ///< of a call
  Statistics time_ms;       ///< of its slowest rank
  double ideal_bytes = 0;   ///< of the rank that has most; NaN: hardly any
  double flops = 0;         ///< likewise; NaN: bytes are what counts
  double limit = 0;         ///< what memory can do of this kind, bytes/s, or cores, FLOP/s
  int64_t messages = 0;     ///< collectives and messages of a call, of the rank that has most
  int64_t bytes_sent = 0;   ///< likewise
  double wire_bytes = 0;    ///< sum over ranks
  int64_t extra_bytes = 0;  ///< beyond inputs and outputs, of the rank that has most
  double error_over_tolerance = 0;  ///< NaN: not checked
  std::string check;                ///< "ok", "FAILED" or "-"
  std::string note;
  std::string finished;  ///< when: UTC, ISO 8601

  double gbytes_per_s() const { return ideal_bytes / time_ms.median / 1e6; }
  double tflops_per_rank() const { return flops / time_ms.median / 1e9; }
  double share_of_limit() const;
};

/// Which rows of an operation are measured, and where they go.
struct RowSink {
  int cycle = 1;
  std::function<bool(const LogprobsResult&)> wanted;  ///< asked with all independent variables
  std::function<void(LogprobsResult)> add;
};

/// Calls body(operation, upstream) for all that the options want.
void for_each_run(const LogprobsOptions& o,
                  const std::function<void(const LogprobsOperation&, bool upstream)>& body);
/// Rows of a sweep's size, when nothing is refused.
int64_t rows_of_a_size(const LogprobsOptions& o);

/// Bytes that a rank needs for an operation, made-up inputs and outputs included.
int64_t planned_bytes(const LogprobsOperation& operation, bool upstream,
                      const LogprobsWorkload& problem, const LogprobsOptions& o, int rank);
/// Why an operation cannot be run here: the case does not admit it, or it needs more memory than
/// `memory_bytes` (0: unknown) on `rank` of the world. Empty: it can.
std::string why_not(const LogprobsOperation& operation, bool upstream,
                    const LogprobsWorkload& problem, const LogprobsOptions& o, int64_t memory_bytes,
                    int rank);

/// Makes, times and verifies an operation in the directions of the options that it has; checks of
/// results, messages and bytes are added to `checks`. Results go to `output`, if there is one.
/// Collective over the grid's world.
void run_operation(const LogprobsOperation& operation, bool upstream, LogprobsContext& context,
                   const MachineRates& rates, const RowSink& rows,
                   std::vector<LogprobsPart>* output, Verification& checks);

}  // namespace gyre
