#include "apps/logprobs/report.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "apps/logprobs/registry.hpp"
#include "comm/agree.hpp"
#include "core/special_values.hpp"
#include "harness/backend.hpp"
#include "report/value.hpp"

namespace gyre {
namespace {

double megabytes(int64_t bytes) {
  return bytes / 1e6;
}

/// The upstream result with the same operation, pass and size; null if there is none, or if one of
/// the two timings breaks a run rule.
const LogprobsResult* upstream_of(const LogprobsResult& row,
                                  const std::vector<LogprobsResult>& rows) {
  const auto same = std::ranges::find_if(rows, [&](const LogprobsResult& other) {
    return other.method == "upstream" && other.op == row.op && other.pass == row.pass &&
           other.tokens == row.tokens;
  });
  if (same == rows.end()) return nullptr;
  const bool official = breaches_of(row.timing).empty() && breaches_of(same->timing).empty();
  return official ? &*same : nullptr;
}

/// The measured rate limit for this kind of traffic. On a GPU, only fills and copies are measured.
double limit_of(RowTraffic traffic, const MachineRates& rates, bool in_place) {
  const double update = in_place && rates.update > 0 ? rates.update : rates.copy;
  switch (traffic) {
    case RowTraffic::reads:
      return rates.read > 0 ? rates.read : rates.copy;
    case RowTraffic::updates:
      return update;
    case RowTraffic::copies:
      return rates.copy;
    case RowTraffic::writes:
      return rates.fill > 0 ? rates.fill : update;
    case RowTraffic::products:
      return rates.flops;
  }
  return 0;
}

/// The largest value of all ranks. NaN if `mine` is NaN, which must then hold on all ranks.
double largest(Communicator& world, double mine) {
  return std::isnan(mine) ? mine : all_reduce_value(world, mine, ReduceOp::max);
}

/// Returns why a run with these options has not compared the file's array `name`.
AnswerUse not_compared(const std::string& name, const LogprobsFile& file, const LogprobsOptions& o,
                       const Refusals& refused) {
  const auto use = [&](const std::string& why_not, bool was_asked) {
    return AnswerUse{name, why_not, was_asked};
  };
  std::vector<LogprobsOperation> wanted = logprobs_operations();
  std::erase_if(wanted, [&](const LogprobsOperation& operation) {
    const auto& arrays = operation.arrays;
    return !o.wants(operation.name) ||
           std::ranges::find(arrays, name, &LogprobsArray::name) == arrays.end();
  });
  if (wanted.empty()) return use("--op " + o.op, false);
  if (o.pass == (name.starts_with("d_") ? "fwd" : "bwd")) return use("--pass " + o.pass, false);
  if (o.check == "none") return use("--check none", false);
  if (!o.wants_method("gyre") && std::ranges::none_of(wanted, &LogprobsOperation::has_upstream))
    return use("--method " + o.method, false);
  if (o.gather_gradient == "none" && wanted.front().reads(gather_gradient_option))
    return use(fmt::format("{} none", gather_gradient_option), false);
  const auto refusal = refused.find(wanted.front().name);
  if (refusal != refused.end()) return use(refusal->second, true);
  const std::string input = inputs_of(file, o.type(), o.output_type())->rounded_input_of(name);
  if (!input.empty()) return use(fmt::format("the run rounds {}", input), true);
  return use("its rows stay", false);
}

/// Whether a pass of the operation has a rate. One that only writes rows backward reads a few
/// elements of each forward, which is too little.
bool has_rate(const LogprobsOperation& operation, Pass pass) {
  return pass == Pass::backward || operation.backward != RowTraffic::writes;
}

}  // namespace

double LogprobsResult::share_of_limit() const {
  if (!(limit > 0)) return nan_of<double>;
  const double amount = std::isnan(flops) ? ideal_bytes : flops;
  return amount / (1e-3 * time_ms.median) / limit;
}

std::vector<LogprobsResult> rows_of(const LogprobsRun& run, const LogprobsOptions& o,
                                    const LogprobsWorkload& problem, int cycle) {
  std::vector<LogprobsResult> rows;
  for (const Pass pass : run.passes(o)) {
    LogprobsResult& row = rows.emplace_back();
    row.op = run.operation.name;
    row.method = run.method.name;
    row.pass = pass;
    row.tokens = problem.tokens();
    row.vocab = problem.vocab.vocab_size;
    row.key = {
        {"op", row.op},         {"method", row.method}, {"pass", std::string(name_of(row.pass))},
        {"tokens", row.tokens}, {"vocab", row.vocab},   {"tp", int64_t{o.tp}},
        {"cp", int64_t{o.cp}}};
    if (cycle > 1) row.key.emplace_back("cycle", int64_t{cycle});
  }
  return rows;
}

void complete(LogprobsResult& row, const LogprobsOp& op, const LogprobsRun& run,
              int64_t memory_before, const MachineRates& rates, bool in_place,
              Communicator& world) {
  const int64_t extra = std::max<int64_t>(0, memory_use().peak_bytes - memory_before);
  row.extra_bytes = all_reduce_value(world, extra, ReduceOp::max);
  row.ideal_bytes = largest(world, op.ideal_bytes(row.pass));
  row.flops = largest(world, op.flops(row.pass));
  row.limit = limit_of(run.operation.traffic(row.pass), rates, in_place);
  row.note = op.note();
}

const Table<LogprobsResult>& logprobs_table() {
  using Row = LogprobsResult;
  static const Table<Row> table(joined<Row>(
      {{
           {"op", "", 20, 0, &Row::op, Align::left},
           {"method", "", 8, 0, &Row::method, Align::left},
           {"pass", "", 4, 0, [](const Row& r) { return std::string(name_of(r.pass)); },
            Align::left},
           {"tokens", "", 8, 0, &Row::tokens},
           {"vocab", "", 7, 0, &Row::vocab},
       },
       timing_columns<Row>(10, 3),
       {
           Column<Row>{"rate", "GB/s/rank", 8, 2, &Row::gbytes_per_s}.with_prefix(),
           {"of_bw", "%", 6, 1,
            [](const Row& r) {
              return std::isnan(r.flops) ? 100 * r.share_of_limit() : std::nan("");
            }},
           Column<Row>{"msgs", "", 5, 0, &Row::messages}.extra(),
           {"sent", "MB/rank", 9, 3, [](const Row& r) { return megabytes(r.bytes_sent); }},
           Column<Row>{"extra", "MB/rank", 9, 2,
                       [](const Row& r) { return megabytes(r.extra_bytes); }}
               .extra(),
       },
       verdict_columns<Row>()}));
  return table;
}

RunReport begin_logprobs_report(const AppContext& context, const LogprobsOptions& o,
                                const LogprobsWorkload& problem) {
  std::vector<int64_t> columns;
  for (int r = 0; r < problem.vocab.ranks(); ++r) columns.push_back(problem.vocab.columns(r));
  const auto [least, most] = std::ranges::minmax(columns);
  RunReport report =
      begin_report(context,
                   {{"tokens", problem.tokens()},
                    {"sequences", problem.sequences()},
                    {"source", problem.origin},
                    {"vocab", problem.vocab.vocab_size},
                    {"columns", problem.vocab.padded()},
                    {"columns_of_rank",
                     least == most ? fmt::format("{}", least) : fmt::format("{}-{}", least, most)},
                    {"picks", problem.picks},
                    {"hidden", problem.hidden},
                    {"temperature", problem.filter.temperature},
                    {"top_k", problem.filter.top_k},
                    {"top_p", problem.filter.top_p},
                    {"min_p", problem.filter.min_p},
                    {"filter_per_token", problem.per_token()}},
                   {});
  report.verification = Verification(o.tol_scale);
  if (problem.tokens() == 0) report.nothing_to_verify = "no tokens";
  if (const std::string crowd = crowding(context, o.threads); !crowd.empty())
    report.unofficial_reasons.push_back(crowd);
  return report;
}

std::vector<Fom> figures_of(const std::vector<LogprobsResult>& rows) {
  std::vector<Fom> figures;
  const bool headline = std::ranges::any_of(rows, [](const LogprobsResult& row) {
    return find_operation(row.op).figure.shown == RateShown::headline;
  });
  std::map<std::pair<std::string, std::string>, std::vector<double>> rates;
  for (const LogprobsResult& row : rows) {
    if (row.method != "gyre" || row.tokens == 0) continue;
    const RateFigure& figure = find_operation(row.op).figure;
    const double rate = std::isnan(row.flops) ? row.gbytes_per_s() : row.tflops_per_rank();
    const bool stands_in = !headline && row.op == rows.front().op;
    if ((figure.shown != RateShown::if_no_headline || stands_in) && !std::isnan(rate)) {
      figures.push_back({figure.metric, rate, figure.unit, row.key});
      rates[{figure.metric, figure.unit}].push_back(rate);
      if (const double share = row.share_of_limit(); std::isnan(row.flops) && !std::isnan(share)) {
        figures.push_back({"share_of_bandwidth", share, "of measured", row.key});
        rates[{"share_of_bandwidth", "of measured"}].push_back(share);
      }
    }
    if (const LogprobsResult* other = upstream_of(row, rows))
      figures.push_back(
          {"speedup_over_upstream", other->time_ms.median / row.time_ms.median, "x", row.key});
  }
  for (const auto& [figure, values] : rates)
    add_average(figures, figure.first, figure.second, values);
  return figures;
}

std::vector<std::string> metrics_of(const LogprobsOptions& o) {
  std::vector<LogprobsResult> rows;
  for (const LogprobsRun& run : runs_of(o))
    for (const Pass pass : run.passes(o)) {
      LogprobsResult row;
      row.op = run.operation.name;
      row.method = run.method.name;
      row.pass = pass;
      row.time_ms.median = row.limit = 1;
      row.ideal_bytes = has_rate(run.operation, pass) ? 1 : nan_of<double>;
      row.flops = run.operation.traffic(pass) == RowTraffic::products ? 1 : nan_of<double>;
      for (row.tokens = 1; row.tokens <= 2; ++row.tokens) rows.push_back(row);
    }
  std::vector<std::string> metrics;
  for (const Fom& figure : figures_of(rows))
    if (std::ranges::find(metrics, figure.metric) == metrics.end())
      metrics.push_back(figure.metric);
  return metrics;
}

std::string answered_operations(const LogprobsFile& file) {
  std::vector<std::string> names;
  for (const LogprobsOperation& operation : logprobs_operations())
    if (file.reference && std::ranges::any_of(operation.arrays, [&](const LogprobsArray& array) {
          return file.reference->arrays.contains(array.name);
        }))
      names.push_back(operation.name);
  return fmt::format("{}", fmt::join(names, ","));
}

std::vector<AnswerUse> answer_uses(const LogprobsFile& file, const LogprobsOptions& o,
                                   const std::set<std::string>& compared, const Refusals& refused) {
  std::vector<AnswerUse> uses;
  if (!file.reference) return uses;
  for (const auto& [name, values] : file.reference->arrays)
    uses.push_back(compared.contains(name) ? AnswerUse{name}
                                           : not_compared(name, file, o, refused));
  for (const std::string& name : file.reference->unknown)
    uses.push_back({name, "not known", lists_several(o.op) || !o.op_is_given});
  return uses;
}

std::string rates_text(const MachineRates& rates) {
  const auto text = [](double rate, const char* unit) {
    return rate > 0 ? si_text(rate, unit) : std::string("n/a");
  };
  if (rates.fill > 0)
    return fmt::format(
        "# a rank's GPU memory, all ranks at once, arrays of {}: fill {}, copy {} (read and "
        "written); shares are of these\n",
        si_text(rates.array_bytes, "B"), text(rates.fill, "B/s"), text(rates.copy, "B/s"));
  return fmt::format(
      "# a rank's memory, all ranks at once, arrays of {}: read {}, update in place {}, copy {}; "
      "f32 FMAs {}\n",
      si_text(rates.array_bytes, "B"), text(rates.read, "B/s"), text(rates.update, "B/s"),
      text(rates.copy, "B/s"), text(rates.flops, "FLOP/s"));
}

std::string smallness_text(const MachineRates& rates, int64_t tokens) {
  if (rates.copy > 0 || tokens == 0) return "";
  return fmt::format(
      "# note: {} tokens are {} of logits a rank: times are those of starting calls and of "
      "messages, and say nothing about memory\n",
      tokens, si_text(rates.array_bytes, "B"));
}

std::string details_text(const LogprobsResult& row) {
  std::string text =
      fmt::format("# {} {} {} {}: p95 {:.3f} ms, CV {:.1f} %", row.op, row.method,
                  name_of(row.pass), row.tokens, row.time_ms.p95, 100 * row.time_ms.cv);
  if (!std::isnan(row.flops))
    text += fmt::format(", {:.4f} TFLOP/s a rank, {:.1f} % of its FMAs", row.tflops_per_rank(),
                        100 * row.share_of_limit());
  else if (!std::isnan(row.ideal_bytes))
    text += fmt::format(", {} of memory a rank at least", si_text(row.ideal_bytes, "B"));
  if (!row.note.empty()) text += ", " + row.note;
  if (row.check != "-") text += ", checked against " + find_operation(row.op).definition;
  return text + "\n";
}

void write_results(OutputFile& output, const std::vector<LogprobsPart>& mine,
                   const LogprobsContext& context, const std::string& input_sha256,
                   const Provenance& provenance) {
  const LogprobsWorkload& problem = context.problem;
  std::vector<std::pair<std::string, double>> parameters;
  for (const RowOperation& operation : row_operations()) {
    if (std::ranges::find(mine, operation.results[0].name, &LogprobsPart::name) == mine.end())
      continue;
    const std::vector<double> values = context.options.parameters_of(operation);
    for (size_t i = 0; i < values.size(); ++i)
      parameters.emplace_back(operation.parameters[i].name, values[i]);
  }
  write_logprobs_results(output,
                         {.vocab_size = problem.vocab.vocab_size,
                          .top_k = problem.filter.top_k,
                          .top_p = problem.filter.top_p,
                          .temperature = problem.filter.temperature,
                          .min_p = problem.filter.min_p,
                          .of_tokens = problem.of_tokens,
                          .parameters = parameters,
                          .input_sha256 = input_sha256,
                          .provenance = provenance},
                         mine);
}

}  // namespace gyre
