#include "apps/predict/run.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "apps/common/workload_options.hpp"
#include "attention/plan_size.hpp"
#include "attention/schedules/registry.hpp"
#include "comm/trace_file.hpp"
#include "core/error.hpp"
#include "core/nearest.hpp"
#include "packing/lengths.hpp"
#include "predict/machine_file.hpp"
#include "predict/simulate.hpp"
#include "report/machine_report.hpp"
#include "sharding/padded_layout.hpp"

namespace gyre {
namespace {

QueryLayouts layout_of(const PredictedCase<Schedule>& c) {
  const std::vector<int64_t>& offsets = c.documents.offsets;
  return {offsets, c.documents.query_offsets, c.layout,
          weighed_by(c.options.layout.for_ranks(c.cp), c.documents.mask, offsets)};
}

AttentionProblem problem_of(const PredictedCase<Schedule>& c, const QueryLayouts& placed) {
  AttentionProblem problem{.layout = &placed.layout,
                           .heads = c.options.head_shape(),
                           .mask = c.documents.mask,
                           .options = c.options.schedule.options,
                           .query_layout = placed.queries()};
  if (!c.options.wants(Pass::backward)) problem.passes = PlanPasses::forward;
  return problem;
}

/// Bytes of all of a rank's own arrays.
int64_t own_bytes(const AttentionProblem& problem, const ElementTypes& types) {
  int64_t bytes = 0;
  for (int kind = 0; kind < array_kinds; ++kind) {
    const auto k = static_cast<ArrayKind>(kind);
    const int64_t rows = problem.layout_of(k).slots_of_rank();
    const int64_t heads = has_keys(k) ? problem.heads.kv_heads : problem.heads.heads;
    bytes += stored_bytes({k, {{0, LocalToken(0), rows}}, {0, heads}, 0}, problem.heads, types);
  }
  return bytes;
}

/// Applies a rate such as "switch=25G".
void apply_link(const std::string& text, MachineModel& machine) {
  const size_t equals = std::min(text.find('='), text.size());
  const std::string name = text.substr(0, equals);
  std::vector<std::string> names;
  LinkTier* tier = nullptr;
  for (LinkTier& link : machine.links) {
    names.push_back(link.name);
    if (link.name == name) tier = &link;
  }
  if (tier == nullptr) {
    const std::string near = nearest(name, names);
    throw_usage("--link {}: the machine has no tier '{}'; {}", text, name,
                near.empty() ? fmt::format("it has {}", fmt::join(names, ", "))
                             : "nearest: '" + near + "'");
  }
  double rate = 0;
  const char* const end = text.data() + text.size();
  const auto [last, status] =
      std::from_chars(text.data() + std::min(equals + 1, text.size()), end, rate);
  const std::string unit(last, end);
  constexpr std::pair<const char*, double> units[] = {{"", 1}, {"K", 1e3}, {"M", 1e6}, {"G", 1e9}};
  const auto* const found = std::find_if(std::begin(units), std::end(units),
                                         [&](const auto& u) { return unit == u.first; });
  if (status != std::errc() || found == std::end(units) || !(rate > 0))
    throw_usage("--link {}: wanted {}=RATE in bytes/s, such as {}=25G", text, name, name);
  tier->bytes_per_s = rate * found->second;
  tier->curve.clear();
  if (tier == machine.links.data()) {  // nobody measured several ranks of such a machine
    std::erase_if(machine.errors, [](const PredictionError& e) { return e.several_ranks; });
    machine.order_margin = 0;
  }
}

}  // namespace

std::vector<Draws> documents_of(const PredictOptions& o) {
  const auto documents_with = [&](const std::vector<int64_t>& lengths, std::string origin) {
    PredictedDocuments documents;
    documents.origin = std::move(origin);
    documents.offsets = o.mask.offsets_of(lengths);
    documents.query_offsets = o.mask.query_offsets_of(documents.offsets);
    documents.mask = o.mask.of(lengths);
    // Throws when the pairs cannot be counted.
    if (o.recurrence.empty())
      pairs_of_heads(documents.offsets, documents.mask, o.head_shape().heads);
    return documents;
  };
  if (!o.generate.empty()) {
    Draws draws;
    LengthSpec spec = parse_length_spec(o.generate);
    for (int i = 0; i < o.seeds; ++i, ++spec.seed) {
      std::string origin;
      const std::vector<int64_t> lengths = generated_lengths(to_string(spec), o.capacity, origin);
      draws.push_back(documents_with(lengths, origin));
      draws.back().seed = spec.seed;
    }
    const auto same = [&](const PredictedDocuments& draw) {
      return draw.offsets == draws.front().offsets;
    };
    if (o.seeds > 1 && std::ranges::all_of(draws, same))
      throw_usage("--seeds {}: all of them give the same documents of --gen {}; leave it out",
                  o.seeds, o.generate);
    return {draws};
  }
  std::vector<Draws> all;
  for (const int64_t size : o.sweep.sizes())
    all.push_back({documents_with(std::vector<int64_t>(o.batch, size),
                                  fmt::format("{} x {} tokens", o.batch, size))});
  return all;
}

MachineModel machine_of(const PredictOptions& o) {
  MachineModel machine = parse_machine_model(o.machine, read_machine_text(o.machine));
  for (const std::string& link : o.links) apply_link(link, machine);
  if (const std::string why = machine.kernel.why_not_selected();
      o.mask.selects_keys() && !why.empty())
    throw_usage("--mask {}: {}: {}; gyre-attention --explain counts pairs and bytes", o.mask.mask,
                o.machine, why);
  const DType type = o.types().activations;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const std::string why = o.recurrence.empty()
                                ? machine.kernel.why_not(pass, type)
                                : machine.recurrence.why_not(o.recurrence, pass, type);
    if (o.wants(pass) && !why.empty())
      throw_usage("{}--dtype {}: {}: {}",
                  o.recurrence.empty() ? "" : fmt::format("--recurrence {}, ", o.recurrence),
                  o.dtype, o.machine, why);
  }
  return machine;
}

std::string PredictedRow::algorithms() const {
  std::vector<std::string> names;
  for (const CollectiveAlgorithm algorithm : prediction.algorithms)
    names.emplace_back(name_of(algorithm));
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, " and "));
}

std::vector<PredictedRow> predict_case(const PredictedCase<Schedule>& c, Verification& checks) {
  const PlannedRequest asked{c.schedule, "predicted", c.cp, c.documents.tokens()};
  check_plan_size(asked, max_streamed_entries, [&](int ranks) {
    const PredictedCase<Schedule> smaller{c.options,  c.documents, ranks,
                                          c.schedule, c.layout,    c.machine};
    const QueryLayouts placed = layout_of(smaller);
    return estimated_entries(c.schedule, problem_of(smaller, placed));
  });
  const QueryLayouts placed = layout_of(c);
  const AttentionProblem problem = problem_of(c, placed);
  const ElementTypes types = c.options.types();
  const int64_t pairs = pairs_of_heads(c.documents.offsets, problem.mask, problem.heads.heads);
  std::vector<PredictedRow> rows;
  for (PassPrediction& prediction :
       predict({c.schedule, problem, types, {0, c.options.tp}}, c.machine)) {
    checks.check("pairs of all plans", 0).add(prediction.pairs, pairs, [&] {
      return fmt::format("{} under {}, cp {}", c.schedule.name, c.layout.name, c.cp);
    });
    if (!c.options.wants(prediction.pass)) continue;
    const Pass pass = prediction.pass;
    PredictedRow& row = rows.emplace_back(row_of(c, std::move(prediction)));
    row.flops = attention_flops(pass, pairs, problem.heads);
    row.own_bytes = own_bytes(problem, types);
    row.competes = c.schedule.competes;
    if (c.machine.kernel.measured(pass, types.activations, problem.heads.head_dim))
      row.error = c.machine.error_of(pass, c.cp);
  }
  return rows;
}

PredictedRow mean_of(const std::vector<PredictedRow>& draws) {
  PredictedRow mean = draws.front();
  if (draws.size() == 1) return mean;
  const auto average = [&](const auto& figure) {
    double sum = 0;
    for (const PredictedRow& draw : draws) sum += static_cast<double>(figure(draw));
    return sum / static_cast<double>(draws.size());
  };
  PassPrediction& p = mean.prediction;
  for (double PassPrediction::*field :
       {&PassPrediction::seconds, &PassPrediction::kernel_mean, &PassPrediction::kernel_most,
        &PassPrediction::compute_only, &PassPrediction::copies_most, &PassPrediction::extrapolated})
    p.*field = average([&](const PredictedRow& draw) { return draw.prediction.*field; });
  for (int64_t PassPrediction::*field :
       {&PassPrediction::pairs, &PassPrediction::messages_most, &PassPrediction::bytes_most})
    p.*field =
        std::llround(average([&](const PredictedRow& draw) { return draw.prediction.*field; }));
  for (size_t tier = 0; tier < p.bytes_by_tier.size(); ++tier)
    p.bytes_by_tier[tier] =
        average([&](const PredictedRow& draw) { return draw.prediction.bytes_by_tier[tier]; });
  mean.flops = average(std::mem_fn(&PredictedRow::flops));
  mean.wire_bytes = average(std::mem_fn(&PredictedRow::wire_bytes));
  mean.tokens = std::llround(average(std::mem_fn(&PredictedRow::tokens)));
  std::ranges::find(mean.key, "tokens", &Fields::value_type::first)->second = mean.tokens;
  const auto neediest = std::ranges::max_element(draws, {}, &PredictedRow::memory_bytes);
  mean.own_bytes = neediest->own_bytes;
  p.transient_bytes = neediest->prediction.transient_bytes;
  mean.draws.clear();
  for (const PredictedRow& draw : draws) {
    mean.draws.push_back(draw.prediction.seconds);
    p.algorithms.insert(draw.prediction.algorithms.begin(), draw.prediction.algorithms.end());
  }
  return mean;
}

std::string predicted_trace(const PredictedCase<Schedule>& c) {
  const QueryLayouts placed = layout_of(c);
  const AttentionProblem problem = problem_of(c, placed);
  const Plan plan = plan_all(c.schedule, problem);
  std::vector<RankTrace> ranks(c.cp);
  double begin = 0;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (!c.options.wants(pass)) continue;
    const Simulation s =
        simulate(plan, pass, problem.heads, c.options.types(), c.machine, {0, c.options.tp});
    for (size_t r = 0; r < ranks.size(); ++r) {
      ranks[r].host = "the machine of the model";
      for (TraceSpan& span : trace_of(s.ranks[r], pass)) {
        span.begin += begin;
        span.end += begin;
        ranks[r].spans.push_back(std::move(span));
      }
    }
    begin += s.makespan();
  }
  return trace_json(std::move(ranks));
}

std::vector<Programs> predicted_programs(const PredictedCase<Schedule>& c) {
  const QueryLayouts placed = layout_of(c);
  const Plan plan = plan_all(c.schedule, problem_of(c, placed));
  std::vector<Programs> passes;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (!c.options.wants(pass)) continue;
    Programs& programs = passes.emplace_back(pass, c.options.head_shape(), c.options.types(),
                                             c.machine, c.cp, GroupPlace{0, c.options.tp});
    for (const RankPlan& rank : plan.ranks) programs.add(programs.compile(rank, plan.schedule));
  }
  return passes;
}

RunReport begin_predicting(AppContext& context, const PredictOptions& o,
                           const MachineModel& machine, const std::string& origin) {
  Fields facts = {{"machine", machine.name}, {"source", origin}};
  if (!o.model.empty())
    facts.emplace_back("model", std::filesystem::path(o.model).filename().string());
  RunReport report = begin_report(context, facts, {});
  report.unofficial_reasons.emplace_back("predicted, not measured");
  return report;
}

int64_t rows_of(const PredictOptions& o, size_t sizes) {
  int64_t rows = 0;
  const int64_t passes = o.pass == "both" ? 2 : 1;
  const auto add = [&](int, size_t, const auto&, const LayoutKind&) { rows += passes; };
  if (o.recurrence.empty())
    for_each_configuration(o, schedules(), sizes, add);
  else
    for_each_configuration(o, state_schedules(), sizes, add);
  return rows;
}

void Refusals::collect(bool several, int cp, const std::string& group, const LayoutKind& layout,
                       const std::function<void()>& predict) {
  try {
    predict();
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage || !several) throw;
    all_.push_back({group.empty() ? error.what() : group, group,
                    fmt::format("cp {} under {}: {}", cp, layout.name, error.what())});
  }
}

std::string Refusals::text() const {
  std::string text;
  std::map<std::string, size_t> more;
  for (const Refusal& r : all_) ++more[r.group];
  for (const Refusal& r : all_) {
    const size_t count = std::exchange(more[r.group], 0);
    if (count == 0) continue;
    text += "# refused: " + r.reason;
    if (count > 1)
      text += fmt::format(" (and {} more{})", count - 1, r.of.empty() ? "" : " of " + r.of);
    text += '\n';
  }
  return text;
}

}  // namespace gyre
