#pragma once
// What both kinds of prediction share: the report, and the configurations that are tried.

#include <functional>
#include <string>
#include <vector>

#include "apps/predict/options.hpp"
#include "attention/schedules/schedule.hpp"
#include "predict/machine.hpp"
#include "report/result.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// Starts the report. `origin`: source of the documents.
RunReport begin_predicting(AppContext& context, const PredictOptions& o,
                           const MachineModel& machine, const std::string& origin);

/// Calls f for each configuration of the options and each size in [0, sizes).
void for_each_configuration(const PredictOptions& o, size_t sizes,
                            const std::function<void(int cp, size_t size, const Schedule& schedule,
                                                     const LayoutKind& layout)>& f);

/// Number of rows of the table if nothing is refused.
int64_t rows_of(const PredictOptions& o, size_t sizes);

/// Collects configurations that schedule or layout refuse.
class Refusals {
 public:
  /// Predicts a configuration. If the options ask for several schedules or layouts, a usage error
  /// is kept, not thrown.
  void collect(const PredictOptions& o, int cp, const Schedule& schedule, const LayoutKind& layout,
               const std::function<void()>& predict);
  /// The first refusal of each schedule, and how many more there are.
  std::string text() const;

 private:
  struct Refusal {
    std::string schedule, reason;
  };
  std::vector<Refusal> all_;
};

}  // namespace gyre
