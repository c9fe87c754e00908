#pragma once
// Predictions of gyre-predict for single configurations.

#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "apps/predict/options.hpp"
#include "attention/schedules/schedule.hpp"
#include "core/error.hpp"
#include "harness/row.hpp"
#include "predict/machine.hpp"
#include "predict/predict.hpp"
#include "recurrence/schedules/schedule.hpp"
#include "report/app.hpp"
#include "report/result.hpp"
#include "report/statistics.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// The documents of one sequence length or of one draw.
struct PredictedDocuments {
  std::vector<int64_t> offsets;        ///< [documents + 1]
  std::vector<int64_t> query_offsets;  ///< [documents + 1]; empty: all tokens have queries
  MaskRule mask;
  std::string origin;
  uint64_t seed = 0;  ///< the seed of the draw; 0 without --gen
  int64_t tokens() const { return offsets.back(); }
};
/// The draws of documents of one size: one for each seed of --seeds, or a single one.
using Draws = std::vector<PredictedDocuments>;
/// The documents of each size of the options.
std::vector<Draws> documents_of(const PredictOptions& o);

/// The machine of --machine, with the rates of --link. Throws usage errors of both.
MachineModel machine_of(const PredictOptions& o);

/// One configuration. Entry is Schedule or StateSchedule.
template <class Entry>
struct PredictedCase {
  const PredictOptions& options;
  const PredictedDocuments& documents;
  int cp;
  const Entry& schedule;
  const LayoutKind& layout;
  const MachineModel& machine;
};

/// The prediction of one direction of a configuration. FLOPs are those of the visible pairs of all
/// ranks of the group, or those of a recurrence, counted token by token.
struct PredictedRow : MeasuredRow {
  std::string schedule, layout;
  int cp = 1;
  int64_t tokens = 0;
  std::vector<double> draws;  ///< seconds of each draw; the other figures are means of the draws
  int64_t own_bytes = 0;      ///< of a rank's own arrays in both passes
  double memory_limit = 0;    ///< bytes per rank; 0: unknown
  bool competes = true;       ///< whether it may be named the fastest, if there are others
  /// Share of the time that 9 in 10 errors are within; NaN: unknown.
  double error = std::numeric_limits<double>::quiet_NaN();
  PassPrediction prediction;

  /// Sample standard deviation of the time over its mean; NaN: one draw.
  double spread() const { return summarize(draws).cv; }
  double tflops_per_rank() const { return flops / prediction.seconds / cp / 1e12; }
  double exposed() const { return prediction.exposed() / prediction.seconds; }
  double imbalance() const { return prediction.kernel_most / prediction.kernel_mean - 1; }
  double memory_bytes() const { return own_bytes + prediction.transient_bytes; }
  bool fits() const { return memory_limit == 0 || memory_bytes() <= memory_limit; }
  /// "outside" if over 1 % of the kernel's time is outside of the measured shapes.
  std::string surface() const { return prediction.extrapolated > 0.01 ? "outside" : "inside"; }
  /// The algorithms of the library's operations: "ring and tree", "none".
  std::string algorithms() const;
  /// The bottleneck: "kernel", "imbalance", "network", "copies", or "memory" if it does not fit.
  std::string bound() const { return fits() ? name_of(prediction.bound()) : "memory"; }
};

/// A row for each pass of the options. Adds to `checks` that the plans have the mask's pairs, or all
/// tokens. Throws a usage error if schedule or layout refuses the configuration.
std::vector<PredictedRow> predict_case(const PredictedCase<Schedule>& c, Verification& checks);
std::vector<PredictedRow> predict_case(const PredictedCase<StateSchedule>& c, Verification& checks);

/// Returns the row whose figures are the means of these rows of several draws. Memory is that of
/// the draw that needs most.
PredictedRow mean_of(const std::vector<PredictedRow>& draws);

/// Returns a row for each pass: the mean over the draws. If one of several draws is refused, throws
/// a usage error that names its seed.
template <class Entry>
std::vector<PredictedRow> predict_draws(const Draws& draws, const PredictedCase<Entry>& first,
                                        Verification& checks) {
  std::vector<std::vector<PredictedRow>> of_pass;
  for (const PredictedDocuments& documents : draws) {
    try {
      const PredictedCase<Entry> one{first.options,  documents,    first.cp,
                                     first.schedule, first.layout, first.machine};
      std::vector<PredictedRow> rows = predict_case(one, checks);
      of_pass.resize(rows.size());
      for (size_t pass = 0; pass < rows.size(); ++pass)
        of_pass[pass].push_back(std::move(rows[pass]));
    } catch (const Error& error) {
      if (error.code() != ExitCode::usage || draws.size() == 1) throw;
      throw_usage("seed {}: {}", documents.seed, error.what());
    }
  }
  std::vector<PredictedRow> means;
  for (const std::vector<PredictedRow>& rows : of_pass) means.push_back(mean_of(rows));
  return means;
}

/// Returns a row with the fields that attention and recurrences share: key, bytes and memory.
template <class Entry>
PredictedRow row_of(const PredictedCase<Entry>& c, PassPrediction prediction) {
  PredictedRow row;
  row.schedule = c.schedule.name;
  row.layout = c.layout.name;
  row.cp = c.cp;
  row.tokens = c.documents.tokens();
  row.key = {{"schedule", row.schedule},
             {"layout", row.layout},
             {"pass", std::string(name_of(prediction.pass))},
             {"tokens", row.tokens},
             {"cp", int64_t{row.cp}},
             {"tp", int64_t{c.options.tp}}};
  const std::vector<double>& wire = prediction.bytes_by_tier;
  row.wire_bytes = std::accumulate(wire.begin(), wire.end(), 0.0);
  row.draws = {prediction.seconds};
  row.memory_limit = c.machine.memory_bytes;
  row.prediction = std::move(prediction);
  return row;
}

/// The timelines of all ranks in the form of --trace of a real run.
std::string predicted_trace(const PredictedCase<Schedule>& c);

/// The programs of the passes of the options, for other simulators.
std::vector<Programs> predicted_programs(const PredictedCase<Schedule>& c);

/// Starts the report. `origin`: the source of the documents.
RunReport begin_predicting(AppContext& context, const PredictOptions& o,
                           const MachineModel& machine, const std::string& origin);

/// Calls f(cp, size, schedule, layout) for each configuration of the options and each size in
/// [0, sizes). `registry` has the schedules that the options choose from.
template <class Entry, class Body>
void for_each_configuration(const PredictOptions& o, const std::vector<Entry>& registry,
                            size_t sizes, const Body& f) {
  for (const int cp : o.cps)
    for (size_t size = 0; size < sizes; ++size)
      for (const Entry& schedule : registry)
        for (const LayoutKind& layout : layout_kinds())
          if (lists(o.schedules(), schedule.name) && o.layout.wants(layout.name))
            f(cp, size, schedule, layout);
}

/// Number of rows of the table if nothing is refused.
int64_t rows_of(const PredictOptions& o, size_t sizes);

/// Collects the configurations that a schedule or a layout refuses.
class Refusals {
 public:
  /// Predicts a configuration. A usage error is kept, not thrown, if `several` is set: the options
  /// ask for several schedules or layouts. `group`: the schedule, or "" to group equal errors.
  void collect(bool several, int cp, const std::string& group, const LayoutKind& layout,
               const std::function<void()>& predict);
  /// The first refusal of each group, and how many more there are.
  std::string text() const;

 private:
  struct Refusal {
    std::string group, of, reason;  ///< of: name of the group, or ""
  };
  std::vector<Refusal> all_;
};

/// The table of predictions. It has a column of bytes for each tier of the machine, and a column of
/// the spread if there are several draws.
Table<PredictedRow> predicted_table(const MachineModel& machine, bool several_draws);

/// The fastest configuration of one number of ranks and tokens.
struct Winner {
  int cp = 1;
  int64_t tokens = 0;
  std::string schedule, layout;
  double seconds = 0;  ///< of all passes
  double tflops_per_rank = 0;
  double efficiency = 0;      ///< share of the time in which the kernel works
  std::vector<double> draws;  ///< seconds of all passes together, in each draw
  int wins = 0;               ///< number of draws in which it is the fastest
  /// The configuration that is the fastest in the most draws.
  struct Usual {
    std::string schedule, layout;
    int wins = 0;
  };
  Usual usual;
  /// Another schedule, and its relative extra time.
  struct Other {
    std::string schedule;
    double margin = 0;
  };
  std::vector<Other> close;   ///< too close to tell (MachineModel::order_margin), fastest first
  std::optional<Other> next;  ///< the fastest of the others
};

/// Winners in the order of the rows, without configurations that do not fit the memory.
std::vector<Winner> winners_of(const std::vector<PredictedRow>& rows, double order_margin);

/// A line on how far predictions for this machine are from measurements, below the table.
std::string error_text(const MachineModel& machine);
/// A line on errors below the table of a whole model, of which nobody published times.
std::string attention_error_text(const MachineModel& machine);

/// A line on errors below the table of a recurrent layer.
std::string recurrence_error_text();

/// A line for each winner, below the table.
std::string winners_text(const std::vector<Winner>& winners);

/// A map: ranks to the right, tokens upwards, a cell coloured by the schedule that wins there.
std::string winners_svg(const std::vector<Winner>& winners, const std::string& title);

/// Predicts the scoring pass of --model for each number of context-parallel ranks, size, schedule
/// and layout, prints the rows and reports them.
ExitCode predict_model(const PredictOptions& o, const MachineModel& machine, AppContext& context);

}  // namespace gyre
