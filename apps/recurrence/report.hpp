#pragma once
// Presentation of gyre-recurrence: table, report, figures of merit, and what a plan costs.

#include <string>
#include <vector>

#include "apps/recurrence/case.hpp"
#include "report/app.hpp"

namespace gyre {

/// Number of rows for one size of a sweep if nothing is refused.
int64_t rows_of_a_size(const RecurrenceOptions& o);

const Table<RecurrenceResult>& recurrence_table();

RunReport begin_recurrence_report(const AppContext& context, const RecurrenceOptions& o,
                                  const RecurrenceWorkload& workload, const RecurrenceShape& shape,
                                  const Backend& backend);

/// Adds the figures of merit: for each kind, pass and number of tokens, the rate of the fastest
/// result that did not fail; and the average rate.
void add_figures(RunReport& report, const std::vector<RecurrenceResult>& results);

/// Calls body(kind, schedule, layout) for everything that the options choose.
template <class Body>
void for_each_choice(const RecurrenceOptions& o, Body body) {
  for (const RecurrenceKind& kind : recurrence_kinds())
    for (const StateSchedule& schedule : state_schedules())
      for (const LayoutKind& layout : layout_kinds())
        if (lists(o.kind, kind.name) && lists(o.schedule, schedule.name) &&
            o.layout.wants(layout.name))
          body(kind, schedule, layout);
}

/// Runs --explain: prints the plans of all ranks. Collective.
ExitCode explain(RecurrenceOptions& o, AppContext& context);

}  // namespace gyre
