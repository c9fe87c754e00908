#include "report/attention_report.hpp"

#include <fmt/format.h>

#include <cmath>

namespace gyre {

const Table<AttentionRow>& attention_table() {
  using Row = AttentionRow;
  static const Table<Row> table({
      {"schedule", "", 18, 0, [](const Row& r) { return r.schedule; }, Align::left},
      {"layout", "", 15, 0, [](const Row& r) { return r.layout; }, Align::left},
      {"pass", "", 4, 0, [](const Row& r) { return std::string(name_of(r.pass)); }, Align::left},
      {"tokens", "", 7, 0, [](const Row& r) { return r.tokens; }},
      {"time", "ms", 9, 3, [](const Row& r) { return r.time_ms.median; }},
      {"min", "ms", 9, 3, [](const Row& r) { return r.time_ms.min; }},
      {"rate", "TF/s/rank", 9, 4, [](const Row& r) { return r.tflops_per_rank(); }},
      {"peak", "%", 5, 1, [](const Row& r) { return 100 * r.share_of_peak(); }},
      {"wire", "MB", 9, 3, [](const Row& r) { return r.wire_bytes / 1e6; }},
      {"msgs", "", 5, 0, [](const Row& r) { return r.messages; }},
      {"exposed", "%", 7, 2, [](const Row& r) { return 100 * r.exposed(); }},
      {"overlap", "%", 7, 1, [](const Row& r) { return 100 * r.overlap(); }},
      {"imbal", "%", 6, 2, [](const Row& r) { return 100 * r.imbalance; }},
      {"extra", "MB", 8, 2,
       [](const Row& r) { return static_cast<double>(r.transient_bytes) / 1e6; }},
      {"err/tol", "", 8, 4, [](const Row& r) { return r.error_over_tolerance; }},
      {"check", "", 6, 0, [](const Row& r) { return r.check; }, Align::left},
  });
  return table;
}

RunReport begin_attention_report(const AppContext& context, const AttentionOptions& o,
                                 const AttentionCase& problem) {
  RunReport report = begin_report(context,
                                  {{"documents", problem.documents()},
                                   {"tokens", problem.tokens()},
                                   {"source", problem.origin},
                                   {"heads", problem.heads.heads},
                                   {"kv_heads", problem.heads.kv_heads},
                                   {"head_dim", problem.heads.head_dim},
                                   {"mask", o.mask},
                                   {"window", problem.mask.window},
                                   {"sinks", !problem.sinks.empty()},
                                   {"dtype", o.dtype},
                                   {"partial_out", o.partial_out},
                                   {"partial_dq", o.partial_dq},
                                   {"wire_dkv", o.wire_dkv},
                                   {"cp", int64_t{o.cp}},
                                   {"threads", int64_t{o.threads}},
                                   {"iters", int64_t{o.iterations}},
                                   {"warmup", int64_t{o.warmup}},
                                   {"check", o.check}},
                                  {});
  report.verification = Verification(o.tol_scale);
  if (!o.network.empty()) report.unofficial_reasons.push_back("emulated network " + o.network);
  return report;
}

void add_row(RunReport& report, const AttentionRow& row) {
  ResultEntry entry;
  entry.key = {{"schedule", row.schedule},
               {"layout", row.layout},
               {"pass", std::string(name_of(row.pass))},
               {"tokens", row.tokens},
               {"cp", int64_t{row.cp}}};
  entry.samples_ms = row.samples_ms;
  entry.measurements = attention_table().fields(row);
  entry.measurements.emplace_back("compute_only_ms", row.compute_ms);
  entry.measurements.emplace_back("communication_only_ms", row.communicate_ms);
  entry.measurements.emplace_back("busiest_rank_bytes", row.busiest_bytes);
  entry.flops = row.flops;
  entry.bytes_wire = row.wire_bytes;
  report.foms.push_back({"attention_rate", row.tflops_per_rank(), "TFLOP/s/rank", entry.key});
  report.results.push_back(std::move(entry));
}

std::string overlap_text(const std::vector<AttentionRow>& rows) {
  std::string text;
  for (const AttentionRow& row : rows)
    if (row.wire_bytes > 0)
      text += fmt::format(
          "# overlap {} {} {} {}: total {:.3f} ms, compute only {:.3f}, communication only {:.3f}, "
          "exposed {:.3f}\n",
          row.schedule, row.layout, name_of(row.pass), row.tokens, row.time_ms.median,
          row.compute_ms, row.communicate_ms, std::max(0.0, row.time_ms.median - row.compute_ms));
  return text;
}

}  // namespace gyre
