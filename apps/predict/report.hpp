#pragma once
// Output of gyre-predict: rows, the fastest configuration of each size, the map of winners.

#include <string>
#include <vector>

#include "apps/predict/run.hpp"

namespace gyre {

/// The table, with a column of bytes for each tier of the machine.
Table<PredictedRow> predicted_table(const MachineModel& machine);

/// The fastest configuration of one number of ranks and tokens.
struct Winner {
  int cp = 1;
  int64_t tokens = 0;
  std::string schedule, layout;
  double seconds = 0;  ///< of all passes
  double tflops_per_rank = 0;
  double efficiency = 0;  ///< share of the time in which the kernel works
  std::string second;     ///< the fastest other schedule; "" without one
  double margin = 0;      ///< relative extra time of `second`
};

/// Winners in the order of the rows, without configurations that do not fit the memory.
std::vector<Winner> winners_of(const std::vector<PredictedRow>& rows);

/// A line for each winner, below the table.
std::string winners_text(const std::vector<Winner>& winners);

/// A map: ranks to the right, tokens upwards, a cell coloured by the schedule that wins there.
std::string winners_svg(const std::vector<Winner>& winners, const std::string& title);

}  // namespace gyre
