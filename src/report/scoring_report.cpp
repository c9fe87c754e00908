#include "report/scoring_report.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "comm/agree.hpp"
#include "runtime/clock.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace {

constexpr double bits_per_nat = 1.4426950408889634;

int64_t bytes_of_document(const Documents& documents, int64_t d) {
  if (documents.tokenizer != byte_tokenizer::name) return 0;
  const auto tokens = documents.document(d);
  return std::count_if(tokens.begin(), tokens.end(),
                       [](int32_t t) { return t < byte_tokenizer::bos; });
}

double ratio(double a, double b) {
  return b > 0 ? a / b : std::nan("");
}

/// One document (or all of them) as a line of the table.
struct DocumentRow {
  std::string name;
  int64_t tokens = 0, bytes = 0;
  DocumentScore score;
  double bits_per_byte() const {
    return ratio(-score.logprob * bits_per_nat, static_cast<double>(bytes));
  }
};

std::vector<DocumentRow> document_rows(const Documents& documents,
                                       std::span<const DocumentScore> scores) {
  std::vector<DocumentRow> rows;
  for (int64_t d = 0; d < documents.count(); ++d) {
    const auto i = static_cast<size_t>(d);
    const std::string name =
        documents.names.empty() ? fmt::format("document {}", d) : documents.names[i];
    rows.push_back({name, documents.length(d), bytes_of_document(documents, d), scores[i]});
  }
  return rows;
}

const Table<DocumentRow>& document_table() {
  static const Table<DocumentRow> table({
      {"tokens", "", 8, 0, [](const DocumentRow& r) { return r.tokens; }},
      {"bits/byte", "", 9, 3, [](const DocumentRow& r) { return r.bits_per_byte(); }},
      {"entropy", "bits", 8, 3,
       [](const DocumentRow& r) {
         return ratio(r.score.entropy * bits_per_nat, static_cast<double>(r.score.predictions));
       }},
      {"document", "", 0, 0, [](const DocumentRow& r) { return r.name; }, Align::left},
  });
  return table;
}

}  // namespace

const Table<ScoringRow>& scoring_table() {
  static const Table<ScoringRow> table({
      {"dp", "", 3, 0, [](const ScoringRow& r) { return int64_t{r.shape.dp}; }},
      {"cp", "", 3, 0, [](const ScoringRow& r) { return int64_t{r.shape.cp}; }},
      {"tp", "", 3, 0, [](const ScoringRow& r) { return int64_t{r.shape.tp}; }},
      {"schedule", "", 8, 0, [](const ScoringRow& r) { return r.schedule; }, Align::left},
      {"tokens", "", 8, 0, [](const ScoringRow& r) { return r.tokens; }},
      {"bins", "", 5, 0, [](const ScoringRow& r) { return r.bins; }},
      {"pack", "%", 5, 1, [](const ScoringRow& r) { return 100 * r.packing; }},
      {"t_med", "ms", 9, 1, [](const ScoringRow& r) { return r.time_ms.median; }},
      {"t_min", "ms", 9, 1, [](const ScoringRow& r) { return r.time_ms.min; }},
      {"t_p95", "ms", 9, 1, [](const ScoringRow& r) { return r.time_ms.p95; }},
      {"cv", "%", 4, 1, [](const ScoringRow& r) { return 100 * r.time_ms.cv; }},
      {"tok/s", "1/s", 8, 0, [](const ScoringRow& r) { return r.tokens_per_second(); }},
      {"GFLOP/s", "per rank", 8, 1,
       [](const ScoringRow& r) { return r.flops / r.ranks() / (r.time_ms.median * 1e6); }},
      {"wire", "MB", 8, 2, [](const ScoringRow& r) { return r.wire_bytes / 1e6; }},
      {"exposed", "%", 7, 1, [](const ScoringRow& r) { return 100 * r.exposed; }},
      {"imb_pair", "%", 8, 1, [](const ScoringRow& r) { return 100 * r.pair_imbalance; }},
      {"imb_time", "%", 8, 1, [](const ScoringRow& r) { return 100 * r.time_imbalance; }},
      {"err/tol", "", 7, 3, [](const ScoringRow& r) { return r.error_over_tolerance; }},
      {"check", "", 6, 0, [](const ScoringRow& r) { return r.check; }, Align::left},
  });
  return table;
}

Passes measure_passes(Scorer& scorer, Decoder& decoder, ProcessGrid& grid, int iterations,
                      int warmup) {
  HostStream stream;
  Passes passes;
  int pass = -warmup;
  const bool terminal = grid.world().rank() == 0 && isatty(STDERR_FILENO) == 1;
  if (terminal)
    scorer.on_progress([&](int64_t done, int64_t all) {
      fmt::print(stderr, "\r{} {}: bin {} of {} \033[K", pass < 0 ? "warmup" : "pass",
                 pass < 0 ? pass + warmup + 1 : pass + 1, done + 1, all);
    });
  const auto sent = [&] { return grid.cp().traffic().bytes_sent + grid.tp().traffic().bytes_sent; };
  for (; pass < iterations; ++pass) {
    const int64_t before = sent();
    grid.world().barrier(stream, "start of a pass")->wait();
    const Stopwatch watch;
    passes.times = scorer.run(decoder);
    if (pass >= 0) passes.milliseconds.push_back(1e3 * watch.seconds());
    passes.wire_bytes = static_cast<double>(sent() - before);
  }
  if (terminal) fmt::print(stderr, "\r\033[K");
  scorer.on_progress({});
  passes.wire_bytes = all_reduce_value(grid.world(), passes.wire_bytes, ReduceOp::sum);
  return passes;
}

ScoringRow make_row(const ScoringPlan& plan, const Scorer& scorer, const Passes& passes,
                    const Samples& samples_ms, const ModelConfig& config,
                    const std::string& schedule, ProcessGrid& grid) {
  ScoringRow row;
  row.shape = grid.shape();
  row.schedule = schedule;
  row.tokens = plan.tokens;
  row.predictions = plan.predictions;
  row.bins = std::ssize(plan.bins);
  row.packing = packing_efficiency(plan.bins, plan.capacity);
  row.time_ms = summarize(slowest_rank(samples_ms));
  row.flops = plan.flops(config);
  row.wire_bytes = passes.wire_bytes;
  row.exposed = all_reduce_value(
      grid.world(), 1e3 * passes.times.exposed() / passes.milliseconds.back(), ReduceOp::max);
  row.pair_imbalance =
      imbalance(all_gather_value(grid.world(), static_cast<double>(scorer.count().pairs)));
  row.time_imbalance = imbalance(all_gather_value(grid.world(), passes.times.attention));
  row.error_over_tolerance = std::nan("");
  row.check = "-";
  return row;
}

ResultsHeader make_results_header(const RunReport& report, const Documents& documents,
                                  const GridShape& shape, const ScoringPlan& plan,
                                  const std::string& schedule) {
  ResultsHeader header;
  header.input_sha256 = report.inputs.at(0).sha256;
  header.model_sha256 = report.inputs.at(1).sha256;
  header.offsets = prediction_offsets(documents.offsets);
  header.names = documents.names;
  PackedBins& packed = header.packed;
  header.cp = shape.cp;
  packed.bin_capacity = plan.capacity;
  for (const PackedBatch& bin : plan.bins)
    packed.add_bin(bin.documents, bin.cu_seqlens, bin.cu_seqlens_padded);
  header.provenance = {
      {"generator", "gyre-pipeline " + report.build.version + " " + report.build.git_sha},
      {"command", report.command_line},
      {"created", report.start},
      {"grid", to_string(shape) + " schedule=" + schedule}};
  return header;
}

Compression compression_of(const Documents& documents, std::span<const DocumentScore> scores) {
  double logprob = 0, entropy = 0, bytes = 0;
  Compression result;
  for (const DocumentRow& row : document_rows(documents, scores)) {
    logprob += row.score.logprob;
    entropy += row.score.entropy;
    result.predictions += row.score.predictions;
    if (row.score.predictions > 0) bytes += static_cast<double>(row.bytes);
  }
  const auto n = static_cast<double>(result.predictions);
  result.bits_per_byte = ratio(-logprob * bits_per_nat, bytes);
  result.bits_per_token = ratio(-logprob * bits_per_nat, n);
  result.mean_entropy_bits = ratio(entropy * bits_per_nat, n);
  return result;
}

void add_row(RunReport& report, const ScoringRow& row, const Samples& samples_ms,
             const Compression& compression) {
  ResultEntry entry;
  entry.key = {{"grid", to_string(row.shape)}, {"schedule", row.schedule}};
  entry.samples_ms = samples_ms;
  entry.measurements = scoring_table().fields(row);
  entry.flops = row.flops;
  entry.bytes_wire = row.wire_bytes;
  report.foms = {{"tokens_per_s", row.tokens_per_second(), "1/s", entry.key},
                 {"bits_per_byte", compression.bits_per_byte, "bit", {}},
                 {"mean_entropy", compression.mean_entropy_bits, "bit", {}}};
  report.results.push_back(std::move(entry));
}

std::string compression_text(const Documents& documents, std::span<const DocumentScore> scores,
                             int top) {
  const Compression all = compression_of(documents, scores);
  std::string text = fmt::format(
      "# score  {} predictions in {} documents: {:.4f} bits/byte, {:.4f} bits/token, mean entropy "
      "{:.4f} bits\n",
      all.predictions, documents.count(), all.bits_per_byte, all.bits_per_token,
      all.mean_entropy_bits);
  std::vector<DocumentRow> rows = document_rows(documents, scores);
  std::erase_if(rows,
                [](const DocumentRow& r) { return r.score.predictions == 0 || r.bytes == 0; });
  const auto shown = std::min<size_t>(static_cast<size_t>(std::max(0, top)), rows.size());
  std::partial_sort(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(shown), rows.end(),
                    [](const DocumentRow& a, const DocumentRow& b) {
                      return a.bits_per_byte() > b.bits_per_byte();
                    });
  if (shown == 0) return text;
  text += fmt::format("# the {} documents that cost most:\n{}", shown, document_table().header());
  for (size_t i = 0; i < shown; ++i) text += as_comment(document_table().row(rows[i]));
  return text;
}

std::string phases_text(const Passes& passes, Communicator& world) {
  const DecoderTimes& times = passes.times;
  const std::pair<const char*, double> phases[] = {{"linear", times.linear},
                                                   {"attention", times.attention},
                                                   {"attention wait", times.attention_wait},
                                                   {"tensor-parallel wait", times.tp_wait},
                                                   {"log-probs", times.logprobs}};
  std::string text = "# phase, slowest rank, share of the pass:";
  const double total = all_reduce_value(world, passes.milliseconds.back() / 1e3, ReduceOp::max);
  for (const auto& [name, seconds] : phases) {
    const double worst = all_reduce_value(world, seconds, ReduceOp::max);
    text += fmt::format("{} {} {:.1f} ms {:.1f} %", text.back() == ':' ? "" : ";", name,
                        1e3 * worst, 100 * worst / total);
  }
  return text + "\n";
}

std::string ranks_text(const Passes& passes, const Scorer& scorer, Communicator& world) {
  struct Row {
    int64_t rank, pairs;
    double linear, attention, attention_wait, tp_wait;
  };
  const Table<Row> table({
      {"rank", "", 5, 0, [](const Row& r) { return r.rank; }},
      {"pairs", "per head", 12, 0, [](const Row& r) { return r.pairs; }},
      {"linear", "ms", 10, 1, [](const Row& r) { return 1e3 * r.linear; }},
      {"attention", "ms", 10, 1, [](const Row& r) { return 1e3 * r.attention; }},
      {"cp_wait", "ms", 10, 1, [](const Row& r) { return 1e3 * r.attention_wait; }},
      {"tp_wait", "ms", 10, 1, [](const Row& r) { return 1e3 * r.tp_wait; }},
  });
  const DecoderTimes& times = passes.times;
  const auto pairs = all_gather_value(world, scorer.count().pairs);
  const auto linear = all_gather_value(world, times.linear);
  const auto attention = all_gather_value(world, times.attention);
  const auto attention_wait = all_gather_value(world, times.attention_wait);
  const auto tp_wait = all_gather_value(world, times.tp_wait);
  std::string text = table.header();
  for (size_t r = 0; r < pairs.size(); ++r)
    text += as_comment(table.row({static_cast<int64_t>(r), pairs[r], linear[r], attention[r],
                                  attention_wait[r], tp_wait[r]}));
  return text;
}

std::string dry_run_text(const ScoringPlan& plan, const ModelConfig& c, const GridShape& shape,
                         const Schedule& schedule) {
  std::vector<double> pairs, wire, slots;
  for (int d = 0; d < shape.dp; ++d) {
    std::vector<PlanCount> counts(static_cast<size_t>(shape.cp));
    int64_t largest = 0;
    for (int64_t bin : plan.bins_of_replica[static_cast<size_t>(d)]) {
      const PackedBatch& batch = plan.bins[static_cast<size_t>(bin)];
      const Plan attention =
          schedule.plan(dual_chunk_swap(batch.bounds(), shape.cp), MaskKind::causal);
      largest = std::max(largest, batch.slots() / shape.cp);
      for (size_t r = 0; r < counts.size(); ++r) {
        const PlanCount one = count(attention.ranks[r]);
        counts[r].pairs += one.pairs;
        counts[r].tokens_sent += one.tokens_sent;
      }
    }
    const double token_bytes =
        2.0 * 4.0 * static_cast<double>(c.kv_width() / shape.tp * c.num_hidden_layers);
    for (const PlanCount& one : counts) {
      pairs.push_back(static_cast<double>(one.pairs));
      wire.push_back(static_cast<double>(one.tokens_sent) * token_bytes);
      slots.push_back(static_cast<double>(largest));
    }
  }
  const auto most = [](const std::vector<double>& v) {
    return v.empty() ? 0.0 : *std::max_element(v.begin(), v.end());
  };
  const double activations =
      4.0 * most(slots) *
      static_cast<double>(3 * c.hidden_size + (3 * c.query_width() + 6 * c.kv_width() +
                                               2 * c.intermediate_size + c.vocab_padded) /
                                                  shape.tp);
  std::string text =
      fmt::format("# dry run, {}, {}: nothing was computed\n", to_string(shape), schedule.name);
  text += fmt::format("#   tokens {}  slots {}  bins {} of {}  packing {:.1f} %  predictions {}\n",
                      plan.tokens, plan.slots, plan.bins.size(), plan.capacity,
                      100 * packing_efficiency(plan.bins, plan.capacity), plan.predictions);
  text += fmt::format(
      "#   FLOPs of a pass {:.4g}  attention pairs of a head and layer {}  imbalance {:.2f} %\n",
      plan.flops(c), plan.pairs, 100 * imbalance(pairs));
  text += fmt::format(
      "#   ring bytes sent by the busiest rank in a pass {:.4g} MB  all ranks {:.4g} MB\n",
      most(wire) / 1e6, std::accumulate(wire.begin(), wire.end(), 0.0) * shape.tp / 1e6);
  text += fmt::format(
      "#   memory of a rank: weights {:.1f} MiB, activations of the largest bin {:.1f} MiB\n",
      4.0 * static_cast<double>(c.parameters()) / shape.tp / 1048576.0, activations / 1048576.0);
  return text;
}

}  // namespace gyre
