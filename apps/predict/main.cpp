// gyre-predict: which schedule is the fastest on a machine, at which number of ranks and tokens;
// from the plans that gyre-attention runs and a file that describes the machine.

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "apps/predict/options.hpp"
#include "apps/predict/report.hpp"
#include "apps/predict/run.hpp"
#include "attention/schedules/registry.hpp"
#include "comm/agree.hpp"
#include "io/sha256.hpp"
#include "report/app.hpp"
#include "report/progress.hpp"

namespace {

using namespace gyre;

struct Refusal {
  std::string schedule, reason;
};

struct Predictions {
  std::vector<PredictedRow> rows;
  std::vector<Refusal> refused;

  /// The first refusal of each schedule, and how many more there are.
  std::string refusals_text() const {
    std::string text;
    std::map<std::string, size_t> more;
    for (const Refusal& r : refused) ++more[r.schedule];
    for (const Refusal& r : refused) {
      const size_t count = std::exchange(more[r.schedule], 0);
      if (count == 0) continue;
      text += "# refused: " + r.reason;
      text += count > 1 ? fmt::format(" (and {} more of {})\n", count - 1, r.schedule) : "\n";
    }
    return text;
  }
};

RunReport begin_predicting(AppContext& context, const PredictOptions& o,
                           const MachineModel& machine, const std::string& origin) {
  RunReport report = begin_report(context,
                                  {{"machine", machine.name},
                                   {"links", fmt::format("{}", fmt::join(o.links, ","))},
                                   {"source", origin},
                                   {"heads", int64_t{o.heads}},
                                   {"kv_heads", int64_t{o.kv_heads}},
                                   {"head_dim", int64_t{o.head_dim}},
                                   {"mask", o.mask},
                                   {"window", o.window},
                                   {"dtype", o.dtype},
                                   {"partial_out", o.partial_out},
                                   {"partial_dq", o.partial_dq},
                                   {"wire_dkv", o.wire_dkv},
                                   {"tp", int64_t{o.tp}}},
                                  {});
  report.unofficial_reasons.emplace_back("predicted, not measured");
  report.inputs = {{o.machine, sha256_of_file(context.world, o.machine)}};
  return report;
}

/// Rows of the table when nothing is refused.
int64_t rows_of(const PredictOptions& o, size_t sizes) {
  const auto wanted = [](const auto& all, const auto& choice) {
    return std::ranges::count_if(all, [&](const auto& one) { return choice.wants(one.name); });
  };
  return wanted(schedules(), o.schedule) * wanted(layout_kinds(), o.layout) *
         static_cast<int64_t>(o.cps.size() * sizes) * (o.pass == "both" ? 2 : 1);
}

/// All passes of one configuration.
void predict_configuration(const PredictedCase& c, const Table<PredictedRow>& table,
                           const Table<PredictedRow>& shown, AppContext& context, RunReport& report,
                           Predictions& all) {
  const PredictOptions& o = c.options;
  context.progress.detail(fmt::format("{}, {}, cp {}, {} tokens", c.schedule.name, c.layout.name,
                                      c.cp, c.documents.tokens()));
  try {
    for (PredictedRow& row : predict_case(c, report.verification)) {
      finish_row(context, report, entry_of(row, table));
      fmt::print("{}", shown.row(row));
      std::fflush(stdout);
      all.rows.push_back(std::move(row));
    }
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage || !(o.schedule.all() || o.layout.all())) throw;
    all.refused.push_back(
        {c.schedule.name, fmt::format("cp {} under {}: {}", c.cp, c.layout.name, error.what())});
  }
}

Predictions predict_all(const PredictOptions& o, const MachineModel& machine,
                        const std::vector<PredictedDocuments>& sizes, AppContext& context,
                        RunReport& report) {
  Predictions all;
  const Table<PredictedRow> table = predicted_table(machine);
  const Table<PredictedRow> shown = table.chosen(shown_columns(context, o.report));
  fmt::print("{}", shown.header());
  for (const int cp : o.cps)
    for (const PredictedDocuments& documents : sizes)
      for (const Schedule& schedule : schedules())
        for (const LayoutKind& layout : layout_kinds())
          if (o.schedule.wants(schedule.name) && o.layout.wants(layout.name))
            predict_configuration({o, documents, cp, schedule, layout, machine}, table, shown,
                                  context, report, all);
  return all;
}

ExitCode run(PredictOptions& o, AppContext& context) {
  check_options(o, context.world.size());
  const MachineModel machine = machine_of(o);
  const std::vector<PredictedDocuments> sizes = documents_of(o);
  RunReport report = begin_predicting(context, o, machine, sizes.front().origin);
  start_run(context, report, o.report, rows_of(o, sizes.size()));
  const Predictions all = predict_all(o, machine, sizes, context, report);
  if (all.rows.empty()) throw_usage("nothing can be predicted:\n{}", all.refusals_text());
  const std::vector<Winner> winners = winners_of(all.rows);
  for (const Winner& w : winners)
    report.foms.push_back({"predicted_tflops_per_rank",
                           w.tflops_per_rank,
                           "TFLOP/s",
                           {{"cp", int64_t{w.cp}},
                            {"tokens", w.tokens},
                            {"schedule", w.schedule},
                            {"layout", w.layout}}});
  return finish_run(context, report, o.report, [&] {
    if (!o.svg.empty())
      context.outputs.add_text(
          o.svg,
          winners_svg(winners, fmt::format("{}: {} heads of {}, {} of keys, {}, {}", machine.name,
                                           o.heads, o.head_dim, o.kv_heads, o.mask, o.dtype)));
    if (!o.trace.empty())
      context.outputs.add_text(
          o.trace, predicted_trace({o, sizes.front(), o.cps.front(), find_schedule(o.schedule.name),
                                    find_layout(o.layout.name), machine}));
    return winners_text(winners) + all.refusals_text();
  });
}

}  // namespace

int main(int argc, char** argv) {
  PredictOptions options;
  const AppInfo info{
      "gyre-predict",
      "Predicts context-parallel attention: every schedule, on a machine that a file describes.",
      "Examples: gyre-predict --machine inputs/machines/h100-sxm-8.toml --cp 8 --tokens 128K\n"
      "          gyre-predict --machine inputs/machines/h100-sxm-8.toml --cp 8,16,32,64 \\\n"
      "                       --min 32K --max 1M --factor 2 --svg winners.svg\n" +
          schedule_help() + layout_help(),
      false};
  return run_app(
      argc, argv, info, [&](CLI::App& app) { declare_options(app, options); },
      [&](AppContext& context) { return run(options, context); });
}
