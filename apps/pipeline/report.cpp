#include "apps/pipeline/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "apps/common/workload_options.hpp"
#include "comm/agree.hpp"

namespace gyre {
namespace {

constexpr double bits_per_nat = 1.4426950408889634;

/// Bytes of text that the predictions of a document are about; 0 if that is unknown.
int64_t bytes_of_document(const Documents& documents, int64_t d) {
  if (!documents.text_bytes.empty()) return documents.text_bytes[d];
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
  double bits_per_byte() const { return ratio(-score.logprob * bits_per_nat, bytes); }
  double bits_per_token() const { return ratio(-score.logprob * bits_per_nat, score.predictions); }
};

std::vector<DocumentRow> document_rows(const Documents& documents,
                                       std::span<const DocumentScore> scores) {
  std::vector<DocumentRow> rows;
  for (int64_t d = 0; d < documents.count(); ++d) {
    const size_t i = d;
    const std::string name =
        documents.names.empty() ? fmt::format("document {}", d) : documents.names[i];
    rows.push_back({name, documents.length(d), bytes_of_document(documents, d), scores[i]});
  }
  return rows;
}

const Table<DocumentRow>& document_table(bool with_teacher) {
  using Row = DocumentRow;
  const auto bits = [](double DocumentScore::*sum) {
    return [sum](const Row& r) { return ratio(r.score.*sum * bits_per_nat, r.score.predictions); };
  };
  const auto make = [&](std::vector<Column<Row>> of_teacher) {
    return Table<Row>(joined<Row>({{{"tokens", "", 8, 0, &Row::tokens},
                                    {"bits/byte", "", 9, 3, &Row::bits_per_byte},
                                    {"bits/token", "", 10, 3, &Row::bits_per_token},
                                    {"entropy", "bits", 8, 3, bits(&DocumentScore::entropy)}},
                                   std::move(of_teacher),
                                   {{"document", "", 0, 0, &Row::name, Align::left}}}));
  };
  static const Table<Row> alone = make({}),
                          taught = make({{"kl", "bits", 8, 4, bits(&DocumentScore::kl)}});
  return with_teacher ? taught : alone;
}

/// Bytes that attention stores for a rank's own rows.
int64_t own_bytes(const RankPlan& rank, const HeadShape& heads, const ElementTypes& types) {
  int64_t bytes = 0;
  for (const ArrayKind kind : {ArrayKind::q, ArrayKind::kv, ArrayKind::out, ArrayKind::stats})
    bytes += stored_bytes(rank.arrays.at(own(kind)), heads, types);
  return bytes;
}

/// Work of the ranks of a planned run in one pass; all ranks of a tp group do
/// the same.
struct Load {
  int64_t slots = 0;                           ///< in all bins, with padding of layouts
  int64_t max_slots = 0;                       ///< of a rank in its largest bin
  int64_t own_bytes = 0, transient_bytes = 0;  ///< of attention in its largest bin
  double max_pairs = 0, pairs = 0;             ///< busiest rank; sum over dp and cp
  int64_t max_sent = 0, messages = 0;          ///< of attention, busiest rank
  double sent = 0;                             ///< bytes, sum over dp and cp
};

/// Adds bin `bin` to the counts of its cp ranks.
void add_bin_of_replica(const ScoringPlan& plan, const ModelConfig& config, int64_t bin,
                        std::vector<PlanCount>& ranks, Load& load) {
  const BinLayout of_bin = plan.layout_of(plan.bins[bin]);
  const ElementTypes types = attention_types(plan.setup.types, plan.setup.grid.cp);
  load.slots += of_bin.layout.padded_slots;
  load.max_slots = std::max(load.max_slots, of_bin.layout.slots_of_rank());
  for (size_t m = 0; m < plan.masks.size(); ++m) {
    const AttentionProblem problem = plan.problem(of_bin, config, m);
    for (size_t r = 0; r < ranks.size(); ++r) {
      const RankPlan rank = plan_rank(*plan.setup.schedule, problem, static_cast<int>(r));
      add_bin(ranks[r], count(rank, Pass::forward, problem.heads, types), plan.masks[m].layers);
      load.own_bytes = std::max(load.own_bytes, own_bytes(rank, problem.heads, types));
    }
  }
}

Load load_of(const ScoringPlan& plan, const ModelConfig& config) {
  Load load;
  for (const std::vector<int64_t>& bins : plan.bins_of_replica) {
    if (bins.empty()) continue;
    std::vector<PlanCount> ranks(plan.setup.grid.cp);
    for (const int64_t bin : bins) add_bin_of_replica(plan, config, bin, ranks, load);
    for (const PlanCount& rank : ranks) {
      const double pairs = rank.pairs;
      const int64_t sent = rank.bytes_sent;
      load.max_pairs = std::max(load.max_pairs, pairs);
      load.pairs += pairs;
      load.max_sent = std::max(load.max_sent, sent);
      load.messages = std::max(load.messages, rank.messages);
      load.sent += sent;
      load.transient_bytes = std::max(load.transient_bytes, rank.transient_bytes);
    }
  }
  return load;
}

}  // namespace

const Table<ScoringResult>& scoring_table(bool with_teacher) {
  using Row = ScoringResult;
  const auto make = [](std::vector<Column<Row>> of_teacher) {
    return Table<Row>(joined<Row>(
        {{
             {"dp", "", 3, 0, [](const Row& r) { return int64_t{r.shape.dp}; }},
             {"cp", "", 3, 0, [](const Row& r) { return int64_t{r.shape.cp}; }},
             {"tp", "", 3, 0, [](const Row& r) { return int64_t{r.shape.tp}; }},
             {"layout", "", 15, 0, &Row::layout, Align::left},
             {"schedule", "", 18, 0, &Row::schedule, Align::left},
             {"tokens", "", 8, 0, &Row::tokens},
             Column<Row>{"bins", "", 5, 0, &Row::bins}.extra(),
             Column<Row>{"pack", "%", 5, 1, [](const Row& r) { return 100 * r.packing; }}.extra(),
         },
         timing_columns<Row>(9, 1),
         {
             {"rate", "tok/s", 8, 0, &Row::tokens_per_second},
             Column<Row>{
                 "flop_rate", "GF/s/rank", 9, 1,
                 [](const Row& r) { return r.flops / r.ranks() / (r.time_ms.median * 1e6); }}
                 .with_prefix(),
             Column<Row>{"wire", "MB", 8, 2, [](const Row& r) { return r.wire_bytes / 1e6; }}
                 .extra(),
             {"exposed", "%", 7, 1, [](const Row& r) { return 100 * r.exposed; }},
             Column<Row>{"of_limit", "%", 8, 1, [](const Row& r) { return 100 * r.share_of_limit; }}
                 .extra(),
             Column<Row>{"imb_pair", "%", 8, 1, [](const Row& r) { return 100 * r.pair_imbalance; }}
                 .extra(),
             Column<Row>{"imb_time", "%", 8, 1, [](const Row& r) { return 100 * r.time_imbalance; }}
                 .extra(),
         },
         std::move(of_teacher),
         verdict_columns<Row>()}));
  };
  static const Table<Row> alone = make({}), taught = make({{"kl", "nats", 8, 4, &Row::kl}});
  return with_teacher ? taught : alone;
}

ResultsHeader make_results_header(const RunReport& report, const Documents& documents,
                                  const ScoringPlan& plan) {
  const ScoringSetup& setup = plan.setup;
  ResultsHeader header;
  header.offsets = prediction_offsets(documents.offsets);
  header.names = documents.names;
  PackedBins& packed = header.packed;
  header.cp = setup.grid.cp;
  packed.bin_capacity = plan.capacity;
  for (const PackedBatch& bin : plan.bins)
    packed.add_bin(bin.documents, bin.cu_seqlens, bin.cu_seqlens_padded);
  packed.prefixes = tables_of(plan.forest);
  header.provenance = {
      {"generator", "gyre-pipeline " + report.build.version + " " + report.build.git_sha},
      {"command", report.command_line},
      {"created", report.start},
      {"grid", fmt::format("{} layout={} schedule={}", to_string(setup.grid), setup.layout->name,
                           setup.schedule->name)}};
  return header;
}

std::string length_note(const Documents& documents, int64_t longest_text) {
  int64_t longer = 0, longest = 0;
  if (longest_text == 0) return "";
  for (int64_t d = 0; d < documents.count(); ++d) {
    if (documents.length(d) - 1 > longest_text) ++longer;  // the last token predicts nothing
    if (documents.length(d) > documents.length(longest)) longest = d;
  }
  if (longer == 0) return "";
  return fmt::format(
      "# model   it was made for {} tokens (max_position_embeddings); longer here: {}, up to the "
      "{} of {}. gyre-text --window cuts texts\n",
      longest_text, count_text(longer, "document"), documents.length(longest),
      documents.label(longest));
}

std::string model_notes(const ScoringInputs& in, DType activations) {
  const bool rounds =
      activations == DType::bf16 &&
      (in.model.widest_matrix_type() != h5::Type::bfloat16 ||
       (in.teacher != nullptr && in.teacher->file.widest_matrix_type() != h5::Type::bfloat16));
  return (rounds ? "# model   weights are rounded to bf16\n" : "") +
         length_note(in.documents, in.model.longest_text());
}

Compression compression_of(const Documents& documents, std::span<const DocumentScore> scores) {
  double logprob = 0, entropy = 0, kl = 0, bytes = 0;
  Compression result;
  for (const DocumentRow& row : document_rows(documents, scores)) {
    logprob += row.score.logprob;
    entropy += row.score.entropy;
    kl += row.score.kl;
    result.predictions += row.score.predictions;
    if (row.score.predictions > 0) bytes += row.bytes;
  }
  const double n = result.predictions;
  result.bits_per_byte = ratio(-logprob * bits_per_nat, bytes);
  result.bits_per_token = ratio(-logprob * bits_per_nat, n);
  result.mean_entropy_bits = ratio(entropy * bits_per_nat, n);
  result.mean_kl_bits = ratio(kl * bits_per_nat, n);
  return result;
}

void add_figures(RunReport& report, const ScoringResult& result, const Compression& compression,
                 int64_t vocab_size) {
  // Rounding may put the entropy of a uniform distribution slightly above log2(vocab_size).
  const double max_entropy = std::log2(vocab_size) + 1e-3;
  report.foms = {{"tokens_per_s", result.tokens_per_second(), "1/s", result.key},
                 {"tokens_per_s_per_rank", result.tokens_per_second() / result.ranks(), "1/s/rank",
                  result.key},
                 {"share_of_limit", result.share_of_limit, "of the limit", result.key},
                 {"bits_per_byte", compression.bits_per_byte, "bit", {}},
                 {"mean_entropy", compression.mean_entropy_bits, "bit", {}, max_entropy}};
}

std::string compression_text(const Documents& documents, std::span<const DocumentScore> scores,
                             int top, bool with_teacher) {
  const Compression all = compression_of(documents, scores);
  if (all.predictions == 0)
    return fmt::format("# score  nothing to score: no token has a next one, in {}\n",
                       count_text(documents.count(), "document"));
  const bool has_bytes = std::isfinite(all.bits_per_byte);
  std::string text = fmt::format(
      "# score  {} predictions in {} documents: {}{:.4f} bits/token, mean "
      "entropy {:.4f} bits{}\n",
      all.predictions, documents.count(),
      has_bytes ? fmt::format("{:.4f} bits/byte, ", all.bits_per_byte) : "", all.bits_per_token,
      all.mean_entropy_bits,
      with_teacher ? fmt::format(", mean KL from the teacher {:.4g} bits", all.mean_kl_bits) : "");
  std::vector<DocumentRow> rows = document_rows(documents, scores);
  std::erase_if(rows, [&](const DocumentRow& r) {
    return r.score.predictions == 0 || (has_bytes && r.bytes == 0);
  });
  const auto cost = [&](const DocumentRow& r) {
    return has_bytes ? r.bits_per_byte() : r.bits_per_token();
  };
  const auto shown = std::min<size_t>(static_cast<size_t>(std::max(0, top)), rows.size());
  std::partial_sort(rows.begin(), rows.begin() + shown, rows.end(),
                    [&](const DocumentRow& a, const DocumentRow& b) { return cost(a) > cost(b); });
  if (shown == 0) return text;
  text += fmt::format("# the {} documents that cost most:\n{}", shown,
                      document_table(with_teacher).header());
  for (size_t i = 0; i < shown; ++i) text += as_comment(document_table(with_teacher).row(rows[i]));
  return text;
}

std::string ranks_text(const ScoringCase& subject, Communicator& world) {
  struct Row {
    int64_t rank, pairs;
    double linear, attention, attention_wait, tp_wait;
  };
  const Table<Row> table({
      {"rank", "", 5, 0, &Row::rank},
      {"pairs", "of all", 12, 0, &Row::pairs},
      {"linear", "ms", 10, 1, [](const Row& r) { return 1e3 * r.linear; }},
      {"attention", "ms", 10, 1, [](const Row& r) { return 1e3 * r.attention; }},
      {"cp_wait", "ms", 10, 1, [](const Row& r) { return 1e3 * r.attention_wait; }},
      {"tp_wait", "ms", 10, 1, [](const Row& r) { return 1e3 * r.tp_wait; }},
  });
  const DecoderTimes& times = subject.times();
  const auto pairs = all_gather_value(world, subject.scorer().count().pairs);
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

int64_t planned_bytes(const ScoringPlan& plan, const ModelConfig& config, const Scorer& scorer,
                      MemorySpace space) {
  const GridShape& grid = plan.setup.grid;
  const DecoderTypes& types = plan.setup.types;
  const TileSize tile = usual_tile(space);
  const int64_t columns = std::min(tile.columns, scored_vocab(config, grid.tp));
  int64_t most = 0;
  for (const BinShard& bin : scorer.shards()) {
    const int64_t rows = std::min(tile.rows, std::ssize(bin.batch.targets));
    most = std::max(most, activation_bytes(config, grid.tp, types, bin.shard.slots,
                                           std::ssize(bin.batch.again)) +
                              own_bytes(bin.plans.attention.front(), scorer.heads(),
                                        attention_types(types, grid.cp)) +
                              (bin.plans.recurrent ? buffer_bytes(bin.plans.recurrent->states,
                                                                  recurrence_shape(config, grid.tp))
                                                   : 0) +
                              rows * columns * size_of(DType::f32));
  }
  return weight_bytes(config, grid.tp, types.activations) + most + scorer.count().transient_bytes;
}

namespace {

/// "528, 36 under a window of 4": of a layer with each mask.
std::string pairs_text(const ScoringPlan& plan) {
  std::string text;
  for (size_t m = 0; m < plan.masks.size(); ++m)
    text += fmt::format("{}{}{}", m > 0 ? ", " : "", plan.pairs_of_mask[m],
                        plan.masks[m].window == 0
                            ? ""
                            : fmt::format(" under a window of {}", plan.masks[m].window));
  return text;
}

/// Says what recurrent layers send in a pass; "" without such layers.
std::string recurrent_text(const ScoringPlan& plan, const ModelConfig& config) {
  if (plan.recurrent_layers == 0) return "";
  const int cp = plan.setup.grid.cp;
  RecurrentTraffic most;
  int64_t all = 0;
  for (const std::vector<int64_t>& bins : plan.bins_of_replica) {
    std::vector<RecurrentTraffic> ranks(cp);
    for (const int64_t bin : bins) {
      const BinLayout of_bin = plan.layout_of(plan.bins[bin]);
      for (int r = 0; r < cp; ++r)
        ranks[r] +=
            plan.recurrent_layers * expected_traffic(plan.recurrent_problem(of_bin, config), r);
    }
    for (const RecurrentTraffic& rank : ranks) {
      most = {std::max(most.messages, rank.messages), std::max(most.bytes, rank.bytes)};
      all += rank.bytes;
    }
  }
  return fmt::format(
      "#   {} recurrent layers, {}, {}: send in a pass, busiest rank {:.4g} MB, at most {} "
      "messages; all ranks {:.4g} MB\n",
      plan.recurrent_layers, plan.setup.recurrent_layout->name, plan.setup.state_schedule->name,
      most.bytes / 1e6, most.messages, all * plan.setup.grid.tp / 1e6);
}

}  // namespace

std::string dry_run_text(const ScoringPlan& plan, const ModelConfig& c) {
  const GridShape& grid = plan.setup.grid;
  const Load load = load_of(plan, c);
  const double mean_pairs = load.pairs / grid.dp / grid.cp;
  const DecoderTypes& types = plan.setup.types;
  const int64_t activations = activation_bytes(c, grid.tp, types, load.max_slots) + load.own_bytes;
  constexpr double mib = 1048576;
  std::string text = fmt::format("# dry run, {}, {}, {}: nothing was computed\n", to_string(grid),
                                 plan.setup.layout->name, plan.setup.schedule->name);
  text += fmt::format("#   tokens {}  slots {}  bins {} of {}  packing {:.1f} %  predictions {}\n",
                      plan.tokens, load.slots, plan.bins.size(), plan.capacity,
                      100 * packing_efficiency(plan.bins, plan.capacity), plan.predictions);
  text += fmt::format(
      "#   FLOPs of a pass {:.4g}  attention pairs of a head and layer {}  imbalance {:.2f} %\n",
      plan.flops(c), pairs_text(plan),
      mean_pairs > 0 ? 100 * (load.max_pairs / mean_pairs - 1) : 0);
  text += fmt::format(
      "#   attention sends in a pass, busiest rank {:.4g} MB, at most {} messages; "
      "all ranks {:.4g} MB\n",
      load.max_sent / 1e6, load.messages, load.sent * grid.tp / 1e6);
  text += recurrent_text(plan, c);
  text += fmt::format(
      "#   memory of a rank: weights {:.1f} MiB, activations of the largest bin {:.1f} MiB, "
      "blocks of other ranks and copies for messages {:.1f} MiB\n",
      weight_bytes(c, grid.tp, types.activations) / mib, activations / mib,
      load.transient_bytes / mib);
  return text;
}

int64_t teacher_bytes(const std::optional<Teacher>& teacher) {
  if (!teacher) return 0;
  return planned_bytes(teacher->plan(), teacher->config(), teacher->scorer(), MemorySpace::host) +
         teacher->bytes();
}

std::string teacher_text(const ScoringPlan& plan, const ModelConfig& teacher,
                         const ModelConfig& student) {
  const GridShape& grid = plan.setup.grid;
  const DecoderTypes& types = plan.setup.types;
  const Load load = load_of(plan, teacher);
  constexpr double mib = 1048576;
  return fmt::format(
      "#   teacher: FLOPs of a pass {:.4g} more; memory of a rank: weights {:.1f} MiB, activations "
      "of the largest bin {:.1f} MiB, hidden states of the model and blocks of logits {:.1f} MiB\n",
      plan.flops(teacher) + divergence_flops(plan.tokens, teacher, student),
      weight_bytes(teacher, grid.tp, types.activations) / mib,
      (activation_bytes(teacher, grid.tp, types, load.max_slots) + load.own_bytes) / mib,
      divergence_bytes(plan, teacher, student, load.max_slots) / mib);
}

}  // namespace gyre
