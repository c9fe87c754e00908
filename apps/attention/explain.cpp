// --explain of gyre-attention (report.hpp): what a plan does, costs and looks like.

#include "predict/explain.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/attention/report.hpp"
#include "attention/plan_size.hpp"
#include "attention/schedules/registry.hpp"
#include "comm/agree.hpp"
#include "predict/plan_json.hpp"
#include "predict/plan_svg.hpp"
#include "report/table.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace {

MachineModel machine_of(const AttentionOptions& o) {
  return flat_machine(1e12 * o.tflops, 1e9 * o.gbytes_per_s, 1e-6 * o.latency_us);
}

/// A schedule under a layout.
struct Choice {
  const Schedule& schedule;
  const LayoutKind& layout;
};

void check_size(const AttentionWorkload& workload, const AttentionOptions& o,
                const Choice& choice) {
  const PlannedRequest asked{choice.schedule, "explained", o.cp, workload.tokens()};
  check_plan_size(asked, max_kept_entries, [&](int ranks) {
    LayoutOptions options = o.layout_options();
    options.cp = ranks;
    const WorkloadLayout placed(workload, choice.layout, options);
    return estimated_entries(choice.schedule, placed.problem_of(workload, o.schedule_options()));
  });
}

/// One direction of one plan.
struct PlanRow {
  std::string schedule, layout;
  Pass pass;
  int64_t kernel_calls = 0, messages = 0, sent = 0, transient = 0;  ///< maximum over ranks
  int64_t sent_by_all = 0;
  double pairs_most = 0, pairs_mean = 0;
  double seconds = 0, exposed = 0;
};

PlanRow row_of(const Plan& plan, const AttentionProblem& problem, const ElementTypes& types,
               const Simulation& times) {
  PlanRow row{plan.schedule, problem.layout->name, times.pass};
  for (const RankPlan& rank : plan.ranks) {
    const PlanCount counted = count(rank, times.pass, problem.heads, types);
    const auto calls = std::ranges::count_if(rank.steps(times.pass), [](const Step& step) {
      return std::holds_alternative<step::Compute>(step);
    });
    const double pairs = counted.pairs;
    row.kernel_calls = std::max<int64_t>(row.kernel_calls, calls);
    row.messages = std::max(row.messages, counted.messages);
    row.sent = std::max(row.sent, counted.bytes_sent);
    row.transient = std::max(row.transient, counted.transient_bytes);
    row.sent_by_all += counted.bytes_sent;
    row.pairs_most = std::max(row.pairs_most, pairs);
    row.pairs_mean += pairs / problem.cp();
  }
  row.seconds = times.makespan();
  row.exposed = times.exposed();
  return row;
}

const Table<PlanRow>& plan_table() {
  using Row = PlanRow;
  const auto megabytes = [](int64_t bytes) { return bytes / 1e6; };
  static const Table<Row> table({
      {"schedule", "", 18, 0, &Row::schedule, Align::left},
      {"layout", "", 15, 0, &Row::layout, Align::left},
      {"pass", "", 4, 0, [](const Row& r) { return std::string(name_of(r.pass)); }, Align::left},
      {"time", "ms", 10, 4, [](const Row& r) { return 1e3 * r.seconds; }},
      {"exposed", "%", 7, 1,
       [](const Row& r) { return r.seconds > 0 ? 100 * r.exposed / r.seconds : 0; }},
      {"imbal", "%", 6, 1,
       [](const Row& r) { return r.pairs_mean > 0 ? 100 * (r.pairs_most / r.pairs_mean - 1) : 0; }},
      {"calls", "", 5, 0, &Row::kernel_calls},
      {"msgs", "", 6, 0, &Row::messages},
      {"sent", "MB/rank", 9, 3, [=](const Row& r) { return megabytes(r.sent); }},
      {"all sent", "MB", 11, 3, [=](const Row& r) { return megabytes(r.sent_by_all); }},
      {"buffers", "MB/rank", 9, 3, [=](const Row& r) { return megabytes(r.transient); }},
  });
  return table;
}

/// "32 query heads of 128, 8 of keys; bf16; a rank computes 400 TFLOP/s and sends 50 GB/s, latency
/// 5 us"
std::string assumptions_text(const AttentionWorkload& workload, const AttentionOptions& o) {
  return fmt::format(
      "{} query heads of {}, {} of keys; {}; "
      "a rank computes {} TFLOP/s and sends {} GB/s, latency {} us",
      workload.heads.heads, name_of_dims(workload.heads), workload.heads.kv_heads,
      name_of(o.types().activations), o.tflops, o.gbytes_per_s, o.latency_us);
}

/// Plans one choice after the other.
class Explainer {
 public:
  Explainer(const AttentionWorkload& workload, const AttentionOptions& o, bool verbose)
      : workload_(workload),
        o_(o),
        verbose_(verbose),
        alone_(!o.schedule.several() && !o.layout.several()) {}

  void add(const Choice& choice) {
    const WorkloadLayout placed(workload_, choice.layout, o_.layout_options());
    const AttentionProblem planned = placed.problem_of(workload_, o_.schedule_options());
    const std::string refusal = choice.schedule.why_not(planned);
    if (!refusal.empty()) throw_usage("schedule {}: {}", choice.schedule.name, refusal);
    check_size(workload_, o_, choice);
    const Plan plan = plan_all(choice.schedule, planned);
    std::vector<Simulation> directions;
    for (const Pass pass : o_.passes())
      directions.push_back(simulate(plan, pass, workload_.heads, o_.types(), machine_of(o_)));
    if (alone_) {
      text_ = gyre::explain(plan, planned, o_.types(), directions, verbose_);
    } else {
      for (const Simulation& s : directions)
        text_ += plan_table().row(row_of(plan, planned, o_.types(), s));
    }
    if (!o_.report.json.empty())
      plans_.push_back(plan_json(plan, planned, o_.types(), directions, alone_));
    if (!o_.svg.empty())
      svg_ = plan_svg(plan, planned, directions, assumptions_text(workload_, o_));
  }

  /// Adds a choice. Keeps the reason of a refusal if there are other choices.
  void try_to_add(const Choice& choice) {
    try {
      add(choice);
    } catch (const Error& error) {
      if (alone_ || error.code() != ExitCode::usage) throw;
      refused_ += fmt::format("# refused under {}: {}\n", choice.layout.name, error.what());
    }
  }

  Explanation finish() const {
    if (text_.empty()) throw_usage("nothing can be explained:\n{}", refused_);
    Explanation all;
    if (!alone_)
      all.text = fmt::format("# cp = {}, {}\n{}", o_.cp, workload_.origin, plan_table().header());
    all.text += text_ + refused_;
    all.text += fmt::format("# times are of a model: {}\n", assumptions_text(workload_, o_));
    all.svg = svg_;
    if (!o_.report.json.empty())
      all.json = dump_json(Json{{"schema", plan_schema},
                                {"cp", o_.cp},
                                {"documents", workload_.origin},
                                {"tokens", workload_.tokens()},
                                {"heads", workload_.heads.heads},
                                {"kv_heads", workload_.heads.kv_heads},
                                {"head_dim", workload_.heads.head_dim},
                                {"v_head_dim", workload_.heads.value_dim()},
                                {"shared_key_dim", workload_.heads.shared_key_dim},
                                {"mask", o_.mask.mask},
                                {"window", workload_.mask.window},
                                {"dtype", name_of(o_.types().activations)},
                                {"tflops", o_.tflops},
                                {"gbytes_per_s", o_.gbytes_per_s},
                                {"latency_us", o_.latency_us},
                                {"plans", plans_}},
                           1) +
                 "\n";
    return all;
  }

 private:
  const AttentionWorkload& workload_;
  const AttentionOptions& o_;
  bool verbose_, alone_;
  std::string text_, refused_, svg_;
  Json plans_ = Json::array();
};

}  // namespace

Explanation explain_workload(const AttentionWorkload& workload, const AttentionOptions& o,
                             bool verbose) {
  Explainer explainer(workload, o, verbose);
  for (const Schedule& schedule : schedules())
    for (const LayoutKind& layout : layout_kinds())
      if (o.schedule.wants(schedule.name) && o.layout.wants(layout.name))
        explainer.try_to_add({schedule, layout});
  return explainer.finish();
}

ExitCode explain(AttentionOptions& o, AppContext& context) {
  run_agreed(context.world, "options",
             [&] { refuse_report_options(context, "--explain", o.report.in_lines()); });
  std::optional<AttentionFile> file;
  if (!o.input.empty()) file = read_attention_file(context.world, o.input);
  std::string text;
  run_on_root(context.world, "explanation", [&] {
    const AttentionWorkload workload =
        file ? workload_of(*file, o) : generated_workload(o, o.sweep.sizes().front());
    const Explanation explanation = explain_workload(workload, o, context.verbose);
    text = explanation.text;
    context.outputs.add_text(o.svg, explanation.svg);
    context.outputs.add_text(o.report.json, explanation.json);
  });
  context.outputs.publish(text);
  return ExitCode::ok;
}

}  // namespace gyre
