
#include "predict/scoring.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

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
  /// Whether all layers have one layout.
  bool one_layout() const { return plan.setup.layout == plan.setup.recurrent_layout; }
  const RecurrentPrediction& recurrent() const { return prediction.recurrent; }
  double relayout_seconds() const { return recurrent().relayout_seconds; }
  double state_wait() const { return prediction.times.recurrence_wait - relayout_seconds(); }
  double attention_seconds() const {
    return prediction.times.attention + prediction.times.attention_wait;
  }
  /// Seconds of recurrences and of waits for states.
  double states_seconds() const { return prediction.times.recurrence + state_wait(); }
};

/// Columns of models with recurrent layers.
std::vector<Column<PassRow>> recurrent_columns() {
  using Row = PassRow;
  const auto count = [](const char* name, auto value) {
    return Column<Row>{name, "", 9, 0, value}.extra();
  };
  const auto megabytes = [](const char* name, auto bytes) {
    return Column<Row>{name, "MB/rank", 14, 3, [bytes](const Row& r) { return bytes(r) / 1e6; }}
        .extra();
  };
  return {
      {"recur", "%", 5, 1, [](const Row& r) { return r.share(r.prediction.times.recurrence); }},
      {"st_wait", "%", 7, 1, [](const Row& r) { return r.share(r.state_wait()); }},
      {"relayout", "%", 8, 1, [](const Row& r) { return r.share(r.relayout_seconds()); }},
      count("relayouts", [](const Row& r) { return r.recurrent().relayouts; }),
      Column<Row>{"relayout_time", "ms", 13, 3,
                  [](const Row& r) { return 1e3 * r.relayout_seconds(); }}
          .extra(),
      count("relayout_msgs", [](const Row& r) { return r.recurrent().relayout.most().messages; }),
      megabytes("relayout_sent", [](const Row& r) { return r.recurrent().relayout.most().bytes; }),
      Column<Row>{"projected_time", "ms", 14, 3,
                  [](const Row& r) { return 1e3 * r.recurrent().projected_seconds; }}
          .extra(),
      megabytes("projected_sent",
                [](const Row& r) { return r.recurrent().projected.most().bytes; }),
      count("recurrent_msgs", [](const Row& r) { return r.recurrent().sent().most().messages; }),
      megabytes("recurrent_sent", [](const Row& r) { return r.recurrent().sent().most().bytes; }),
      Column<Row>{"sent", "MB", 9, 3,
                  [](const Row& r) {
                    return (r.prediction.bytes_sent +
                            static_cast<double>(r.prediction.recurrent_bytes)) /
                           1e6;
                  }}
          .extra(),
  };
}

Table<PassRow> pass_table(bool with_recurrences) {
  using Row = PassRow;
  std::vector<Column<Row>> of_states, of_recurrences;
  if (with_recurrences) {
    of_states = {{"recurrent_layout", "", 16, 0,
                  [](const Row& r) { return r.plan.setup.recurrent_layout->name; }, Align::left},
                 {"states", "", 13, 0,
                  [](const Row& r) { return r.plan.setup.state_schedule->name; }, Align::left}};
    of_recurrences = recurrent_columns();
  }
  return Table<Row>(joined<Row>(
      {{
           {"dp", "", 3, 0, [](const Row& r) { return int64_t{r.grid().dp}; }},
           {"cp", "", 3, 0, [](const Row& r) { return int64_t{r.grid().cp}; }},
           {"tp", "", 2, 0, [](const Row& r) { return int64_t{r.grid().tp}; }},
           {"layout", "", 15, 0, [](const Row& r) { return r.plan.setup.layout->name; },
            Align::left},
           {"schedule", "", 18, 0, [](const Row& r) { return r.plan.setup.schedule->name; },
            Align::left},
       },
       std::move(of_states),
       {
           {"tokens", "", 7, 0, [](const Row& r) { return r.plan.tokens; }},
           Column<Row>{"bins", "", 5, 0, [](const Row& r) { return std::ssize(r.plan.bins); }}
               .extra(),
           {"time", "ms", 8, 2, [](const Row& r) { return 1e3 * r.prediction.seconds; }},
           Column<Row>{"rate", "tok/s", 7, 0, &Row::tokens_per_second}.with_prefix(),
           Column<Row>{"flop_rate", "TF/s/rank", 9, 2,
                       [](const Row& r) {
                         return r.flops / r.grid().ranks() / r.prediction.seconds / 1e12;
                       }}
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
       },
       std::move(of_recurrences),
       {
           Column<Row>{"head", "%", 5, 1,
                       [](const Row& r) { return r.share(r.prediction.times.head); }}
               .extra(),
           Column<Row>{"imb_dp", "%", 6, 1,
                       [](const Row& r) { return 100 * r.prediction.imbalance(); }}
               .extra(),
           {"memory", "GB", 6, 2, [](const Row& r) { return r.memory / 1e9; }},
           Column<Row>{"extrapolated", "%", 12, 1,
                       [](const Row& r) { return 100 * r.prediction.extrapolated; }}
               .extra(),
       }}));
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
  const ModelConfig& config;
  ScoringPredictor predictor;
  bool recurs() const { return config.recurrent_layers() > 0; }
};

/// The schedules and layouts of a row.
struct PassChoice {
  const Schedule& schedule;
  const LayoutKind& layout;
  const StateSchedule& states;
  const LayoutKind& recurrent_layout;
};

PassRow predict_pass(ModelJob& job, const Corpus& corpus, int cp, const PassChoice& choice,
                     Verification& checks) {
  const PredictOptions& o = job.options;
  PassRow row;
  ScoringSetup setup;
  setup.grid = {o.dp, cp, o.tp};
  setup.layout = &choice.layout;
  setup.layout_options = o.layout.for_ranks(cp);
  setup.schedule = &choice.schedule;
  setup.schedule_options = o.schedule.options;
  setup.types.activations = o.types().activations;
  setup.recurrent_layout = &choice.recurrent_layout;
  setup.state_schedule = &choice.states;
  const int64_t bin = round_up(corpus.capacity, setup.slot_multiple());
  row.plan =
      plan_scoring(corpus.offsets, o.prefixes.forest_of({corpus.tokens, corpus.offsets}, bin),
                   job.config, setup, bin);
  check_scoring_size(row.plan, corpus.offsets, job.config, true);
  row.prediction = job.predictor.predict(row.plan);
  checks.check("pairs of all plans", 0).add(row.prediction.pairs, row.plan.pairs, [&] {
    return fmt::format("{} under {}, {}", choice.schedule.name, choice.layout.name,
                       to_string(setup.grid));
  });
  row.flops = row.plan.flops(job.config);
  row.key = {{"grid", to_string(row.grid())},
             {"layout", choice.layout.name},
             {"schedule", choice.schedule.name},
             {"tokens", row.plan.tokens}};
  if (job.recurs()) {
    row.key.emplace_back("recurrent_layout", choice.recurrent_layout.name);
    row.key.emplace_back("state_schedule", choice.states.name);
  }
  row.memory =
      weight_bytes(job.config, o.tp, o.types().activations) + row.prediction.activation_bytes;
  row.memory_limit = job.machine.memory_bytes;
  return row;
}

/// Calls f(states, layout) for each choice of recurrent layers, or once for a model without.
void for_each_recurrent_choice(
    const ModelJob& job, const std::function<void(const StateSchedule&, const LayoutKind&)>& f) {
  const PredictOptions& o = job.options;
  if (!job.recurs()) return f(state_schedules().front(), default_recurrent_layout());
  for (const StateSchedule& states : state_schedules())
    for (const LayoutKind& layout : layout_kinds())
      if (lists(o.state_schedule, states.name) && lists(o.recurrent_layout, layout.name))
        f(states, layout);
}

/// The rows that have tokens and fit the memory of a rank, of schedules that compete if there are
/// any.
std::vector<const PassRow*> candidates_of(const std::vector<PassRow>& rows) {
  std::vector<const PassRow*> fitting;
  for (const PassRow& row : rows)
    if (row.fits() && row.plan.tokens > 0) fitting.push_back(&row);
  const auto competes = [](const PassRow* row) { return row->plan.setup.schedule->competes; };
  if (std::ranges::any_of(fitting, competes)) std::erase_if(fitting, std::not_fn(competes));
  return fitting;
}

/// For each number of tokens, the fastest of these rows.
std::vector<const PassRow*> fastest_of(const std::vector<const PassRow*>& rows) {
  std::vector<const PassRow*> fastest;
  for (const PassRow* row : rows) {
    const auto known = std::ranges::find_if(
        fastest, [&](const PassRow* other) { return other->plan.tokens == row->plan.tokens; });
    if (known == fastest.end())
      fastest.push_back(row);
    else if (row->prediction.seconds < (*known)->prediction.seconds)
      *known = row;
  }
  return fastest;
}

/// The fastest of these rows; null: there is none.
const PassRow* fastest_row(const std::vector<const PassRow*>& rows,
                           const std::function<double(const PassRow&)>& seconds,
                           const std::function<bool(const PassRow&)>& counts) {
  const PassRow* fastest = nullptr;
  for (const PassRow* row : rows)
    if (counts(*row) && (fastest == nullptr || seconds(*row) < seconds(*fastest))) fastest = row;
  return fastest;
}

/// Lines with the cost of a pass's changes of layout, before the projections and behind them.
std::string relayouts_text(const RecurrentPrediction& r) {
  const RecurrentTraffic rows = r.relayout.most(), projected = r.projected.most();
  std::string text = fmt::format(
      "#     {} changes of layout take {:.4g} ms; the busiest rank sends {} messages, {:.4g} MB\n",
      r.relayouts, 1e3 * r.relayout_seconds, rows.messages, rows.bytes / 1e6);
  if (rows.bytes > 0)
    text += fmt::format(
        "#     behind the projections they would take {:.4g} ms and send {:.4g} MB, {:.2f} times\n",
        1e3 * r.projected_seconds, projected.bytes / 1e6,
        static_cast<double>(projected.bytes) / static_cast<double>(rows.bytes));
  return text;
}

/// Lines with the fastest choices among rows of one grid and number of tokens.
std::string kinds_text(const std::vector<const PassRow*>& rows, const ModelConfig& config) {
  const auto any = [](const PassRow&) { return true; };
  const PassRow& softmax = *fastest_row(rows, &PassRow::attention_seconds, any);
  const PassRow& states = *fastest_row(rows, &PassRow::states_seconds, any);
  const int64_t recurrent = config.recurrent_layers(),
                others = config.num_hidden_layers - recurrent;
  const ScoringSetup &of_softmax = softmax.plan.setup, &of_states = states.plan.setup;
  std::string text =
      fmt::format("# {}, {} tokens: the fastest\n", to_string(softmax.grid()), softmax.plan.tokens);
  if (others > 0)
    text += fmt::format("#   of {} layers of softmax attention: {} under {}, {:.4g} ms a layer\n",
                        others, of_softmax.schedule->name, of_softmax.layout->name,
                        1e3 * softmax.attention_seconds() / static_cast<double>(others));
  text += fmt::format("#   of {} recurrent layers: {} under {}, {:.4g} ms a layer\n", recurrent,
                      of_states.state_schedule->name, of_states.recurrent_layout->name,
                      1e3 * states.states_seconds() / static_cast<double>(recurrent));
  const auto whole = [](const PassRow& row) { return row.prediction.seconds; };
  for (const bool one : {true, false}) {
    const PassRow* row =
        fastest_row(rows, whole, [&](const PassRow& r) { return r.one_layout() == one; });
    if (row == nullptr) continue;
    text += fmt::format("#   pass with {}: {}, {:.4g} ms\n",
                        one ? "one layout" : "a layout for each kind", name_of_choice(row->plan),
                        1e3 * row->prediction.seconds);
    if (!one) text += relayouts_text(row->recurrent());
  }
  return text;
}

std::string fastest_text(const std::vector<const PassRow*>& fastest) {
  if (fastest.empty()) return "# no pass has tokens and fits the memory of a rank\n";
  std::string text;
  for (const PassRow* row : fastest)
    text += fmt::format("# fastest of {} tokens: {}, {}: {:.0f} tokens/s on {} ranks\n",
                        row->plan.tokens, to_string(row->grid()), name_of_choice(row->plan),
                        row->tokens_per_second(), row->grid().ranks());
  return text;
}

/// The fastest choice for each kind of layer by itself, and of the whole pass with one layout and
/// with one for each kind, for each grid and number of tokens.
std::string text_of_kinds(const std::vector<const PassRow*>& rows, const ModelConfig& config) {
  std::vector<std::vector<const PassRow*>> sizes;
  for (const PassRow* row : rows) {
    const auto same = std::ranges::find_if(sizes, [&](const auto& size) {
      return size.front()->grid() == row->grid() && size.front()->plan.tokens == row->plan.tokens;
    });
    (same == sizes.end() ? sizes.emplace_back() : *same).push_back(row);
  }
  std::string text;
  for (const std::vector<const PassRow*>& size : sizes) text += kinds_text(size, config);
  return text;
}

}  // namespace

ExitCode predict_model(const PredictOptions& o, const MachineModel& machine, AppContext& context) {
  const ModelConfig config = read_model_config(context.world, o.model);
  ModelJob job{o, machine, config, {config, machine}};
  ConfigErrors errors;
  check_tensor_parallel(config, o.tp, errors);
  const std::string why = machine.decoder.why_not(o.types().activations);
  if (!why.empty()) errors.add("{}: {}", o.machine, why);
  if (const PredictOptions usual; !job.recurs() && (o.state_schedule != usual.state_schedule ||
                                                    o.recurrent_layout != usual.recurrent_layout))
    errors.add("--state-schedule, --recurrent-layout: the model has no recurrent layers");
  errors.throw_if_any("impossible configuration");
  const std::vector<Corpus> corpora = corpora_of(o, context.world);
  RunReport report = begin_predicting(context, o, machine, corpora.front().origin);
  int64_t recurrent_choices = 0;
  for_each_recurrent_choice(job,
                            [&](const StateSchedule&, const LayoutKind&) { ++recurrent_choices; });
  start_run(context, report, o.report, rows_of(o, corpora.size()) * recurrent_choices);
  const Table<PassRow> table = pass_table(job.recurs());
  Suite<PassRow> suite(context, report, o.report, table);
  Refusals refused;
  for_each_configuration(
      o, schedules(), corpora.size(),
      [&](int cp, size_t size, const Schedule& schedule, const LayoutKind& layout) {
        context.progress.detail(fmt::format("{}, {}, cp {}", schedule.name, layout.name, cp));
        for_each_recurrent_choice(
            job, [&](const StateSchedule& states, const LayoutKind& recurrent_layout) {
              const PassChoice choice{schedule, layout, states, recurrent_layout};
              refused.collect(
                  o.has_several() || (job.recurs() && o.has_several_of_states()), cp,
                  job.recurs() ? "" : schedule.name, layout, [&] {
                    suite.add(predict_pass(job, corpora[size], cp, choice, report.verification));
                  });
            });
      });
  if (suite.rows().empty()) throw_usage("nothing can be predicted:\n{}", refused.text());
  const std::vector<const PassRow*> candidates = candidates_of(suite.rows()),
                                    fastest = fastest_of(candidates);
  for (const PassRow* row : fastest)
    report.foms.push_back({"predicted_tokens_per_s", row->tokens_per_second(), "1/s", row->key});
  return finish_run(context, report, o.report, [&] {
    return attention_error_text(machine) + fastest_text(fastest) +
           (job.recurs() ? text_of_kinds(candidates, config) : "") + refused.text();
  });
}

}  // namespace gyre
