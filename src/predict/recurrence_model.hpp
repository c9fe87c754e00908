#pragma once
// Duration of a recurrence's kernel, which computes chunks of tokens:
//
//     seconds of a call = launch + tokens of its longest scan · scan + FLOPs / rate
//
// Chunks of a scan run one after another, so that few heads leave most of a processor idle. `scan`
// is the time of a token in that case. Compositions of maps take the time of their FLOPs.

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
  /// Rate of summaries, whose kernel repeats the work inside chunks; 0: flops_per_s.
  double summary_flops_per_s = 0;

  double seconds(const ChunkedWork& work, bool summary = false) const;
};

struct RecurrenceModel {
  std::vector<RecurrenceRate> rates;

  /// Returns why there is no rate; "" if there is one.
  std::string why_not(const std::string& kind, Pass pass, DType type) const;
  /// Returns the rate. Throws a usage error if there is none.
  const RecurrenceRate& of(const std::string& kind, Pass pass, DType type) const;
};

}  // namespace gyre
