#pragma once
// Duration of a recurrence's kernel, which computes chunks of tokens:
//
//     seconds of a call = launch + tokens of its longest scan · scan + FLOPs / rate
//
// A chunk of a scan waits for the state before it, so that few heads leave most of a processor idle:
// `scan` is what a token then takes, however many heads and documents there are. Compositions of
// maps take their FLOPs alone.

#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/pass.hpp"
#include "recurrence/plan.hpp"

namespace gyre {

/// The kernel of one kind, direction and type.
struct RecurrenceRate {
  std::string kind;  ///< of recurrence_kinds()
  Pass pass = Pass::forward;
  DType type = DType::bf16;
  double launch_s = 0;     ///< of a call over tokens
  double scan_s = 0;       ///< of each token of a scan
  double flops_per_s = 0;  ///< in FLOPs of chunked_work()
  /// The same of summaries, for kernels that compute again what is inside chunks; 0: flops_per_s.
  double summary_flops_per_s = 0;

  double seconds(const ChunkedWork& work, bool summary = false) const;
};

struct RecurrenceModel {
  std::vector<RecurrenceRate> rates;

  /// "" where of() has an answer.
  std::string why_not(const std::string& kind, Pass pass, DType type) const;
  /// Throws a usage error if there is none.
  const RecurrenceRate& of(const std::string& kind, Pass pass, DType type) const;
};

}  // namespace gyre
