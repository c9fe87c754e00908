#pragma once
// One operation of gyre-logprobs: made, measured, counted, verified.

#include <optional>
#include <string>
#include <vector>

#include "apps/logprobs/operation.hpp"
#include "report/statistics.hpp"

namespace gyre {

/// What this rank's memory and cores, or its GPU's memory, can do while those of all other ranks do
/// the same; the slowest rank's, 0: unknown.
struct MachineRates {
  double read = 0, update = 0, copy = 0;  ///< bytes/s, read and written ones together
  double fill = 0;                        ///< of a GPU
  double flops = 0;                       ///< f32 multiply-adds, FLOP/s
  int64_t array_bytes = 0;                ///< what memory was measured with
};
/// Calls on fewer bytes take less time than what surrounds them: no rate of memory is their limit.
inline constexpr int64_t least_measured_bytes = int64_t{1} << 20;
/// Measured on arrays of about `bytes`, at most 64 MiB: what fits caches is compared with caches.
/// Rates of memory are unknown below least_measured_bytes. Collective.
MachineRates measure_rates(int64_t bytes, int threads, Communicator& world);
/// The same of the memory of `stream`: of a GPU's, copies and fills, on arrays of at most 512 MiB,
/// by its own marks. `world` is of host memory.
MachineRates measure_rates(int64_t bytes, int threads, Communicator& world, Stream& stream);

/// An operation by one method in one direction, measured.
struct LogprobsResult {
  std::string op, method;
  Pass pass = Pass::forward;
  int64_t tokens = 0, vocab = 0;
  int tp = 1, cp = 1;
  Statistics time_ms;       ///< of a call, slowest rank
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
  Samples samples_ms;

  double gbytes_per_s() const { return ideal_bytes / time_ms.median / 1e6; }
  double tflops_per_rank() const { return flops / time_ms.median / 1e9; }
  double share_of_limit() const;
};

/// Bytes that a rank needs for an operation, made-up inputs and outputs included.
int64_t needed_bytes(const LogprobsOperation& operation, bool upstream,
                     const LogprobsWorkload& problem, const LogprobsOptions& o, int rank);
/// Why an operation cannot be run here: the case does not admit it, or it needs more memory than
/// `memory_bytes` (0: unknown) on `rank` of the world. Empty: it can.
std::string why_not(const LogprobsOperation& operation, bool upstream,
                    const LogprobsWorkload& problem, const LogprobsOptions& o, int64_t memory_bytes,
                    int rank);

/// Makes, times and verifies an operation in the directions of the options that it has; checks of
/// results, messages and bytes are added to `checks`. Results go to `output`, if there is one.
/// Collective over the grid's world.
std::vector<LogprobsResult> run_operation(const LogprobsOperation& operation, bool upstream,
                                          LogprobsContext& context, const MachineRates& rates,
                                          LogprobsOutput* output, Verification& checks);

}  // namespace gyre
