#include "apps/recurrence/report.hpp"

#include <algorithm>

#include "apps/common/network_options.hpp"
#include "apps/common/replay_options.hpp"
#include "harness/backend.hpp"

namespace gyre {

int64_t rows_of_a_size(const RecurrenceOptions& o) {
  int64_t choices = 0;
  for_each_choice(o, [&](const auto&, const auto&, const auto&) { ++choices; });
  return choices * std::ssize(o.passes());
}

const Table<RecurrenceResult>& recurrence_table() {
  using Row = RecurrenceResult;
  static const Table<Row> table(joined<Row>(
      {{
           {"kind", "", 5, 0, &Row::kind, Align::left},
           {"schedule", "", 13, 0, &Row::schedule, Align::left},
           {"layout", "", 15, 0, &Row::layout, Align::left},
           {"pass", "", 4, 0, [](const Row& r) { return std::string(name_of(r.pass)); },
            Align::left},
           {"tokens", "", 7, 0, &Row::tokens},
       },
       timing_columns<Row>(9, 3),
       {
           Column<Row>{"rate", "TF/s/rank", 8, 4, &Row::tflops_per_rank}.with_prefix(),
           {"sent", "MB/rank", 9, 3, [](const Row& r) { return r.bytes_sent / 1e6; }},
           Column<Row>{"msgs", "", 5, 0, &Row::messages}.extra(),
           {"exposed", "%", 7, 1, [](const Row& r) { return 100 * r.exposed(); }},
           {"extra", "%", 6, 1, [](const Row& r) { return 100 * r.more_flops / r.flops; }},
           Column<Row>{"imbal", "%", 6, 1, [](const Row& r) { return 100 * r.imbalance; }}.extra(),
           Column<Row>{"buffers", "MB/rank", 8, 2,
                       [](const Row& r) { return r.buffer_bytes / 1e6; }}
               .extra(),
       },
       verdict_columns<Row>()}));
  return table;
}

RunReport begin_recurrence_report(const AppContext& context, const RecurrenceOptions& o,
                                  const RecurrenceWorkload& workload, const RecurrenceShape& shape,
                                  const Backend& backend) {
  RunReport report = begin_report(context,
                                  {{"documents", workload.documents()},
                                   {"tokens", workload.tokens()},
                                   {"source", workload.origin},
                                   {"heads", shape.value_heads},
                                   {"key_heads", shape.key_heads},
                                   {"key_dim", shape.key_dim},
                                   {"value_dim", shape.value_dim},
                                   {"conv", shape.convolution}},
                                  {});
  report.verification = Verification(o.tol_scale);
  if (workload.tokens() == 0) report.nothing_to_verify = "no tokens";
  if (o.replay) report.unofficial_reasons.push_back(replay_reason(o.cp));
  if (!o.network.empty()) report.unofficial_reasons.push_back(network_reason(o.network));
  if (const std::string crowd = crowding(context, o.threads); !crowd.empty())
    report.unofficial_reasons.push_back(crowd);
  backend.describe(report);
  return report;
}

void add_figures(RunReport& report, const std::vector<RecurrenceResult>& results) {
  std::vector<const RecurrenceResult*> fastest;
  std::vector<double> rates;
  for (const RecurrenceResult& result : results) {
    if (!(result.flops > 0)) continue;
    rates.push_back(result.tflops_per_rank());
    if (result.check == "FAILED") continue;
    const auto rival = std::ranges::find_if(fastest, [&](const RecurrenceResult* other) {
      return other->kind == result.kind && other->pass == result.pass &&
             other->tokens == result.tokens;
    });
    if (rival == fastest.end())
      fastest.push_back(&result);
    else if (result.tflops_per_rank() > (*rival)->tflops_per_rank())
      *rival = &result;
  }
  for (const RecurrenceResult* result : fastest)
    report.foms.push_back(
        {"recurrence_rate", result->tflops_per_rank(), "TFLOP/s/rank", result->key});
  add_average(report.foms, "recurrence_rate", "TFLOP/s/rank", rates);
}

}  // namespace gyre
