#include "apps/attention/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "apps/common/host.hpp"
#include "attention/kernels/make_kernel.hpp"
#include "predict/explain.hpp"

namespace gyre {
namespace {

Fields key_of(const AttentionResult& result) {
  return {{"schedule", result.schedule},
          {"layout", result.layout},
          {"pass", std::string(name_of(result.pass))},
          {"tokens", result.tokens},
          {"cp", int64_t{result.cp}}};
}

}  // namespace

const Table<AttentionResult>& attention_table() {
  using Row = AttentionResult;
  static const Table<Row> table({
      {"schedule", "", 18, 0, [](const Row& r) { return r.schedule; }, Align::left},
      {"layout", "", 15, 0, [](const Row& r) { return r.layout; }, Align::left},
      {"pass", "", 4, 0, [](const Row& r) { return std::string(name_of(r.pass)); }, Align::left},
      {"tokens", "", 7, 0, [](const Row& r) { return r.tokens; }},
      {"time", "ms", 9, 3, [](const Row& r) { return r.time_ms.median; }},
      {"min", "ms", 9, 3, [](const Row& r) { return r.time_ms.min; }},
      {"rate", "TF/s/rank", 9, 4, [](const Row& r) { return r.tflops_per_rank(); }},
      {"of_peak", "%", 7, 1, [](const Row& r) { return 100 * r.share_of_peak(); }},
      {"sent", "MB/rank", 9, 3,
       [](const Row& r) { return static_cast<double>(r.busiest_bytes()) / 1e6; }},
      {"msgs", "", 5, 0, [](const Row& r) { return r.messages(); }},
      {"exposed", "%", 7, 1, [](const Row& r) { return 100 * r.exposed(); }},
      {"overlap", "%", 7, 1, [](const Row& r) { return 100 * r.overlap(); }},
      {"imbal", "%", 6, 1, [](const Row& r) { return 100 * r.kernel_imbalance(); }},
      {"buffers", "MB/rank", 8, 2,
       [](const Row& r) { return static_cast<double>(r.transient_bytes) / 1e6; }},
      {"err/tol", "", 8, 4, [](const Row& r) { return r.error_over_tolerance; }},
      {"check", "", 6, 0, [](const Row& r) { return r.check; }, Align::left},
  });
  return table;
}

std::string kernel_of(const AttentionOptions& o) {
  return kernel_name({o.kernel, o.types().activations},
                     o.backend.on_gpu() ? MemorySpace::device : MemorySpace::host);
}

std::unique_ptr<BlockKernel> make_kernel(const AttentionOptions& o, Stream& stream) {
  return make_block_kernel(stream, {o.kernel, o.types().activations, o.threads});
}

RunReport begin_attention_report(const AppContext& context, const AttentionOptions& o,
                                 const AttentionWorkload& workload, const Backend& backend) {
  RunReport report = begin_report(context,
                                  {{"documents", workload.documents()},
                                   {"tokens", workload.tokens()},
                                   {"source", workload.origin},
                                   {"heads", workload.heads.heads},
                                   {"kv_heads", workload.heads.kv_heads},
                                   {"head_dim", workload.heads.head_dim},
                                   {"mask", o.mask},
                                   {"window", workload.mask.window},
                                   {"sinks", !workload.sinks.empty()},
                                   {"dtype", o.dtype},
                                   {"partial_out", o.partial_out},
                                   {"partial_dq", o.partial_dq},
                                   {"wire_dkv", o.wire_dkv},
                                   {"cp", int64_t{o.cp}},
                                   {"kernel", kernel_of(o)},
                                   {"threads", int64_t{o.threads}},
                                   {"iters", int64_t{o.iterations}},
                                   {"warmup", int64_t{o.warmup}},
                                   {"check", o.check}},
                                  {});
  report.verification = Verification(o.tol_scale);
  if (!o.network.empty()) report.unofficial_reasons.push_back("emulated network " + o.network);
  if (const std::string crowd = crowding(context, o.threads); !crowd.empty())
    report.unofficial_reasons.push_back(crowd);
  backend.describe(report);
  return report;
}

void add_result(RunReport& report, const AttentionResult& result) {
  ResultEntry entry;
  entry.key = key_of(result);
  entry.samples_ms = result.samples_ms;
  entry.measurements = attention_table().fields(result);
  entry.measurements.emplace_back("compute_only_ms", result.compute_ms);
  entry.measurements.emplace_back("communication_only_ms", result.communicate_ms);
  entry.measurements.emplace_back("exposed_ms", result.exposed_ms);
  entry.measurements.emplace_back("exposed_noise_ms", result.exposed_noise_ms);
  entry.flops = result.flops;
  entry.bytes_wire = result.wire_bytes;
  report.results.push_back(std::move(entry));
}

void add_figures(RunReport& report, const std::vector<AttentionResult>& results) {
  std::vector<const AttentionResult*> fastest;
  for (const AttentionResult& result : results) {
    if (result.flops == 0) continue;
    const auto same =
        std::find_if(fastest.begin(), fastest.end(), [&](const AttentionResult* other) {
          return other->pass == result.pass && other->tokens == result.tokens;
        });
    if (same == fastest.end())
      fastest.push_back(&result);
    else if (result.tflops_per_rank() > (*same)->tflops_per_rank())
      *same = &result;
  }
  for (const AttentionResult* result : fastest)
    report.foms.push_back(
        {"attention_rate", result->tflops_per_rank(), "TFLOP/s/rank", key_of(*result)});
}

namespace {

std::string peak_text(const AttentionResult& result, int threads) {
  if (!(result.peak > 0)) return "# peak n/a\n";
  return fmt::format("# peak {:.4g} GFLOP/s a core, measured with f32 FMAs, {} a rank\n",
                     result.peak / threads / 1e9, threads);
}

std::string parts_text(const AttentionResult& result) {
  std::string text = fmt::format(
      "# {} {} {} {}: total {:.3f} ms, compute only {:.3f}, communication only {:.3f}, exposed "
      "{:.3f} (quartiles {:.3f} apart)\n",
      result.schedule, result.layout, name_of(result.pass), result.tokens, result.time_ms.median,
      result.compute_ms, result.communicate_ms, result.exposed_ms, result.exposed_noise_ms);
  using Line = std::pair<int, const AttentionRankTimes*>;
  const Table<Line> table({
      {"rank", "", 8, 0, [](const Line& l) { return int64_t{l.first}; }},
      {"kernels", "ms", 10, 3, [](const Line& l) { return l.second->kernel_ms; }},
      {"wait", "ms", 10, 3, [](const Line& l) { return l.second->wait_ms; }},
      {"copy", "ms", 10, 3, [](const Line& l) { return l.second->copy_ms; }},
      {"pairs", "", 14, 0, [](const Line& l) { return l.second->pairs; }},
      {"sent", "MB", 10, 3,
       [](const Line& l) { return static_cast<double>(l.second->bytes_sent) / 1e6; }},
      {"msgs", "", 6, 0, [](const Line& l) { return l.second->messages; }},
  });
  text += table.header();
  for (const int rank : shown_ranks(result.cp, 64))
    text += as_comment(table.row({rank, &result.ranks.at(static_cast<size_t>(rank))}));
  return text;
}

}  // namespace

std::string notes_text(const std::vector<std::string>& refused, const std::string& kernel_note) {
  std::string text;
  for (const std::string& reason : refused) text += fmt::format("# refused {}\n", reason);
  if (!kernel_note.empty()) text += fmt::format("# kernel on rank 0: {}\n", kernel_note);
  return text;
}

std::string details_text(const std::vector<AttentionResult>& results, int threads) {
  std::string text = peak_text(results.front(), threads);
  for (const AttentionResult& result : results) text += parts_text(result);
  return text;
}

}  // namespace gyre
