
#include "predict/scoring.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "apps/predict/run.hpp"
#include "attention/schedules/registry.hpp"
#include "harness/suite.hpp"
#include "io/checkpoints/model_config_file.hpp"
#include "io/schemas/documents.hpp"
#include "packing/lengths.hpp"
#include "report/progress.hpp"

namespace gyre {
namespace {

/// The scored documents as offsets [documents + 1]. `tokens` matter only if prefixes are shared.
struct Corpus {
  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> tokens;
  int64_t capacity = 0;  ///< slots of a bin
  std::string origin;

  void add(const std::vector<int64_t>& lengths) {
    for (const int64_t length : lengths) offsets.push_back(offsets.back() + length);
  }
};

struct PassRow : MeasuredRow {
  ScoringPlan plan;
  int64_t memory = 0;       ///< bytes per rank
  double memory_limit = 0;  ///< 0: unknown
  ScoringPrediction prediction;

  const GridShape& grid() const { return plan.setup.grid; }
  double tokens_per_second() const { return plan.tokens / prediction.seconds; }
  double share(double seconds) const { return 100 * seconds / prediction.seconds; }
  bool fits() const { return memory_limit == 0 || memory <= memory_limit; }
};

const Table<PassRow>& pass_table() {
  using Row = PassRow;
  static const Table<Row> table({
      {"dp", "", 3, 0, [](const Row& r) { return int64_t{r.grid().dp}; }},
      {"cp", "", 3, 0, [](const Row& r) { return int64_t{r.grid().cp}; }},
      {"tp", "", 2, 0, [](const Row& r) { return int64_t{r.grid().tp}; }},
      {"layout", "", 15, 0, [](const Row& r) { return r.plan.setup.layout->name; }, Align::left},
      {"schedule", "", 18, 0, [](const Row& r) { return r.plan.setup.schedule->name; },
       Align::left},
      {"tokens", "", 7, 0, [](const Row& r) { return r.plan.tokens; }},
      Column<Row>{"bins", "", 5, 0, [](const Row& r) { return std::ssize(r.plan.bins); }}.extra(),
      {"time", "ms", 8, 2, [](const Row& r) { return 1e3 * r.prediction.seconds; }},
      Column<Row>{"rate", "tok/s", 7, 0, &Row::tokens_per_second}.with_prefix(),
      Column<Row>{
          "flop_rate", "TF/s/rank", 9, 2,
          [](const Row& r) { return r.flops / r.grid().ranks() / r.prediction.seconds / 1e12; }}
          .with_prefix()
          .extra(),
      {"linear", "%", 6, 1, [](const Row& r) { return r.share(r.prediction.times.linear); }},
      Column<Row>{"elementwise", "%", 11, 1,
                  [](const Row& r) { return r.share(r.prediction.times.elementwise); }}
          .extra(),
      {"attn", "%", 5, 1, [](const Row& r) { return r.share(r.prediction.times.attention); }},
      {"cp_wait", "%", 7, 1,
       [](const Row& r) { return r.share(r.prediction.times.attention_wait); }},
      {"tp_wait", "%", 7, 1, [](const Row& r) { return r.share(r.prediction.times.tp_wait); }},
      Column<Row>{"head", "%", 5, 1, [](const Row& r) { return r.share(r.prediction.times.head); }}
          .extra(),
      Column<Row>{"imb_dp", "%", 6, 1, [](const Row& r) { return 100 * r.prediction.imbalance(); }}
          .extra(),
      {"memory", "GB", 6, 2, [](const Row& r) { return r.memory / 1e9; }},
      Column<Row>{"extrapolated", "%", 12, 1,
                  [](const Row& r) { return 100 * r.prediction.extrapolated; }}
          .extra(),
  });
  return table;
}

std::vector<Corpus> corpora_of(const PredictOptions& o, Communicator& world) {
  std::vector<Corpus> all;
  if (!o.input.empty()) {
    Documents documents = read_documents(world, o.input);
    all.push_back({std::move(documents.offsets), std::move(documents.tokens), o.capacity, o.input});
    return all;
  }
  if (!o.generate.empty()) {
    const LengthSpec spec = parse_length_spec(o.generate);
    all.push_back({{0}, {}, o.capacity, to_string(spec)});
    all.back().add(draw_lengths(spec));
    return all;
  }
  for (const int64_t size : o.sweep.sizes()) {
    all.push_back({{0}, {}, size, fmt::format("{} x {} tokens", o.batch, size)});
    all.back().add(std::vector<int64_t>(o.batch, size));
  }
  return all;
}

/// State that all rows share.
struct ModelJob {
  const PredictOptions& options;
  const MachineModel& machine;
  ModelConfig config;
};

PassRow predict_pass(const ModelJob& job, const Corpus& corpus, int cp, const Schedule& schedule,
                     const LayoutKind& layout, Verification& checks) {
  const PredictOptions& o = job.options;
  PassRow row;
  ScoringSetup setup;
  setup.grid = {o.dp, cp, o.tp};
  setup.layout = &layout;
  setup.layout_options = o.layout.for_ranks(cp);
  setup.schedule = &schedule;
  setup.schedule_options = o.schedule.options;
  setup.types.activations = o.types().activations;
  const int64_t bin = round_up(corpus.capacity, setup.slot_multiple());
  row.plan =
      plan_scoring(corpus.offsets, o.prefixes.forest_of({corpus.tokens, corpus.offsets}, bin),
                   job.config, setup, bin);
  check_scoring_size(row.plan, corpus.offsets, job.config, true);
  row.prediction = predict_scoring(row.plan, job.config, job.machine);
  checks.check("pairs of all plans", 0).add(row.prediction.pairs, row.plan.pairs, [&] {
    return fmt::format("{} under {}, {}", schedule.name, layout.name, to_string(setup.grid));
  });
  row.flops = row.plan.flops(job.config);
  row.key = {{"grid", to_string(row.grid())},
             {"layout", layout.name},
             {"schedule", schedule.name},
             {"tokens", row.plan.tokens}};
  row.memory =
      weight_bytes(job.config, o.tp, o.types().activations) + row.prediction.activation_bytes;
  row.memory_limit = job.machine.memory_bytes;
  return row;
}

/// For each number of tokens, the fastest of the rows that fit the memory of a rank.
std::vector<const PassRow*> fastest_of(const std::vector<PassRow>& rows) {
  std::vector<const PassRow*> fastest;
  for (const PassRow& row : rows) {
    if (!row.fits() || row.plan.tokens == 0) continue;
    const auto known = std::ranges::find_if(
        fastest, [&](const PassRow* other) { return other->plan.tokens == row.plan.tokens; });
    if (known == fastest.end())
      fastest.push_back(&row);
    else if (row.prediction.seconds < (*known)->prediction.seconds)
      *known = &row;
  }
  return fastest;
}

std::string fastest_text(const std::vector<const PassRow*>& fastest) {
  if (fastest.empty()) return "# no pass has tokens and fits the memory of a rank\n";
  std::string text;
  for (const PassRow* row : fastest)
    text +=
        fmt::format("# fastest of {} tokens: {}, {} under {}: {:.0f} tokens/s on {} ranks\n",
                    row->plan.tokens, to_string(row->grid()), row->plan.setup.schedule->name,
                    row->plan.setup.layout->name, row->tokens_per_second(), row->grid().ranks());
  return text;
}

}  // namespace

ExitCode predict_model(const PredictOptions& o, const MachineModel& machine, AppContext& context) {
  const ModelJob job{o, machine, read_model_config(context.world, o.model)};
  ConfigErrors errors;
  check_tensor_parallel(job.config, o.tp, errors);
  const std::string why = machine.decoder.why_not(o.types().activations);
  if (!why.empty()) errors.add("{}: {}", o.machine, why);
  errors.throw_if_any("impossible configuration");
  const std::vector<Corpus> corpora = corpora_of(o, context.world);
  RunReport report = begin_predicting(context, o, machine, corpora.front().origin);
  start_run(context, report, o.report, rows_of(o, corpora.size()));
  Suite<PassRow> suite(context, report, o.report, pass_table());
  Refusals refused;
  for_each_configuration(
      o, schedules(), corpora.size(),
      [&](int cp, size_t size, const Schedule& schedule, const LayoutKind& layout) {
        context.progress.detail(fmt::format("{}, {}, cp {}", schedule.name, layout.name, cp));
        refused.collect(o, cp, schedule.name, layout, [&] {
          suite.add(predict_pass(job, corpora[size], cp, schedule, layout, report.verification));
        });
      });
  if (suite.rows().empty()) throw_usage("nothing can be predicted:\n{}", refused.text());
  const std::vector<const PassRow*> fastest = fastest_of(suite.rows());
  for (const PassRow* row : fastest)
    report.foms.push_back({"predicted_tokens_per_s", row->tokens_per_second(), "1/s", row->key});
  return finish_run(context, report, o.report, [&] {
    return attention_error_text(machine) + fastest_text(fastest) + refused.text();
  });
}

}  // namespace gyre
