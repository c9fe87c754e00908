#include "apps/attention/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "attention/kernels/make_kernel.hpp"
#include "core/index.hpp"
#include "harness/backend.hpp"
#include "predict/explain.hpp"

namespace gyre {
namespace {

/// Whether the exposed time, a median, is below the interquartile range of its samples.
bool drowns_in_noise(const AttentionResult& r) {
  return r.wire_bytes > 0 && std::abs(r.exposed_ms) < r.exposed_noise_ms;
}

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
      {"sent", "MB", 10, 3, [](const Line& l) { return l.second->bytes_sent / 1e6; }},
      {"msgs", "", 6, 0, [](const Line& l) { return l.second->messages; }},
  });
  text += table.header();
  for (const int rank : shown_ranks(result.cp, 64))
    text += as_comment(table.row({rank, &result.ranks.at(rank)}));
  return text;
}

/// f32 values in host memory of a matrix, or of some columns of each head. Copies them unless it is
/// the whole of an f32 matrix.
class AsFloat {
 public:
  AsFloat(const MatrixRef& from, Stream& stream) : AsFloat(from, stream, {1, from.cols}) {}
  AsFloat(const MatrixRef& from, Stream& stream, const HeadColumns& part) : here_(from, stream) {
    const ConstMatrixRef& matrix = here_.matrix();
    const int64_t columns = part.heads * part.dim;
    if (matrix.type == DType::f32 && columns == matrix.cols) {
      view_ = matrix.as<float>();
      return;
    }
    values_ = Buffer<float>(matrix.rows * columns);
    for (int64_t r = 0; r < matrix.rows; ++r)
      for (int64_t c = 0; c < columns; ++c) values_[r * columns + c] = here_.at(r, part.at(c));
    view_ = {values_.data(), matrix.rows, columns, columns};
  }
  const MatrixView<const float>& view() const { return view_; }

 private:
  HostCopy here_;
  Buffer<float> values_;
  MatrixView<const float> view_;
};

}  // namespace

int64_t rows_of_a_size(const AttentionOptions& o) {
  const auto wanted = [](const auto& all, const auto& choice) {
    return std::ranges::count_if(all, [&](const auto& one) { return choice.wants(one.name); });
  };
  return wanted(schedules(), o.schedule) * wanted(layout_kinds(), o.layout) *
         std::ssize(o.passes());
}

const Table<AttentionResult>& attention_table() {
  using Row = AttentionResult;
  static const Table<Row> table(joined<Row>(
      {{
           {"schedule", "", 18, 0, &Row::schedule, Align::left},
           {"layout", "", 15, 0, &Row::layout, Align::left},
           {"pass", "", 4, 0, [](const Row& r) { return std::string(name_of(r.pass)); },
            Align::left},
           {"tokens", "", 7, 0, &Row::tokens},
       },
       timing_columns<Row>(9, 3),
       {
           Column<Row>{"rate", "TF/s/rank", 8, 4, &Row::tflops_per_rank}.with_prefix(),
           {"of_peak", "%", 7, 1, [](const Row& r) { return 100 * r.share_of_peak(); }},
           {"sent", "MB/rank", 9, 3, [](const Row& r) { return r.bytes_sent / 1e6; }},
           Column<Row>{"msgs", "", 5, 0, &Row::messages}.extra(),
           Column<Row>{"exposed", "%", 7, 1, [](const Row& r) { return 100 * r.exposed(); }}
               .doubted(drowns_in_noise),
           Column<Row>{"overlap", "%", 7, 1, [](const Row& r) { return 100 * r.overlap(); }}
               .extra(),
           Column<Row>{"imbal", "%", 6, 1, [](const Row& r) { return 100 * r.kernel_imbalance(); }}
               .extra(),
           Column<Row>{"buffers", "MB/rank", 8, 2,
                       [](const Row& r) { return r.transient_bytes / 1e6; }}
               .extra(),
       },
       verdict_columns<Row>()}));
  return table;
}

std::string kernel_of(const AttentionOptions& o) {
  if (o.emulates_compute()) return "emulated";
  return kernel_name({o.kernel, o.types().activations},
                     o.backend.on_gpu() ? MemorySpace::device : MemorySpace::host);
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
                                   {"window", workload.mask.window},
                                   {"sinks", !workload.sinks.empty()},
                                   {"kernel", kernel_of(o)}},
                                  {});
  report.verification = Verification(o.tol_scale);
  if (workload.tokens() == 0) report.nothing_to_verify = "no tokens";
  if (o.replay)
    report.unofficial_reasons.push_back(
        fmt::format("replayed: one process runs the {} ranks in turn", o.cp));
  if (!o.network.empty()) report.unofficial_reasons.push_back("emulated network " + o.network);
  if (o.emulates_compute())
    report.unofficial_reasons.push_back("emulated compute " + o.compute + ": nothing is computed");
  if (const std::string crowd = crowding(context, o.threads); !crowd.empty())
    report.unofficial_reasons.push_back(crowd);
  backend.describe(report);
  return report;
}

namespace {

bool is_same_case(const AttentionResult& a, const AttentionResult& b) {
  return a.schedule == b.schedule && a.layout == b.layout;
}

/// The fastest result of a pass and number of tokens, and the fastest one of another schedule or
/// layout, if any. Results that failed do not count.
struct Race {
  const AttentionResult* first;
  const AttentionResult* second = nullptr;
};

std::vector<Race> races_of(const std::vector<AttentionResult>& results) {
  std::vector<Race> races;
  for (const AttentionResult& result : results) {
    if (!(result.flops > 0) || result.check == "FAILED") continue;
    const auto race = std::ranges::find_if(races, [&](const Race& r) {
      return r.first->pass == result.pass && r.first->tokens == result.tokens;
    });
    const auto is_faster = [&](const AttentionResult* than) {
      return than == nullptr || result.tflops_per_rank() > than->tflops_per_rank();
    };
    if (race == races.end()) {
      races.push_back({&result});
    } else if (is_faster(race->first)) {
      if (!is_same_case(result, *race->first)) race->second = race->first;
      race->first = &result;
    } else if (!is_same_case(result, *race->first) && is_faster(race->second)) {
      race->second = &result;
    }
  }
  return races;
}

}  // namespace

void add_figures(RunReport& report, const std::vector<AttentionResult>& results) {
  for (const Race& race : races_of(results))
    report.foms.push_back(
        {"attention_rate", race.first->tflops_per_rank(), "TFLOP/s/rank", race.first->key});
  std::vector<double> rates;
  for (const AttentionResult& result : results)
    if (result.flops > 0) rates.push_back(result.tflops_per_rank());
  add_average(report, "attention_rate", "TFLOP/s/rank", rates);
}

std::string winners_text(const std::vector<AttentionResult>& results) {
  std::string text;
  for (const auto& [first, second] : races_of(results)) {
    if (second == nullptr) continue;
    const Statistics &a = first->time_ms, &b = second->time_ms;
    const bool known = !std::isnan(a.median_high) && !std::isnan(b.median_low);
    text += fmt::format(
        "# fastest {}, {} tokens: {} under {}, {:.4g} ms; next: {} under {}, {:.1f} % longer, {}\n",
        name_of(first->pass), first->tokens, first->schedule, first->layout, a.median,
        second->schedule, second->layout, 100 * (b.median / a.median - 1),
        !known                         ? "too few repetitions to tell"
        : a.median_high < b.median_low ? "beyond the noise"
                                       : "within the noise");
  }
  return text;
}

std::string graph_text(const std::vector<AttentionResult>& results) {
  if (results.empty()) return "";
  const auto [least, most] =
      std::ranges::minmax_element(results, {}, &AttentionResult::graph_operations);
  std::string text =
      fmt::format("# CUDA graphs: up to {} operations a launch on rank 0", most->graph_operations);
  const int64_t windows =
      std::ranges::max_element(results, {}, &AttentionResult::graph_windows)->graph_windows;
  if (windows > 0) text += fmt::format(", up to {} arrays in windows of NCCL", windows);
  if (least->graph_operations == 0)
    text += fmt::format("; {}, {}, {}: not every iteration launched one, as memory was given back",
                        least->schedule, least->layout, name_of(least->pass));
  return text + "\n";
}

std::string details_text(const std::vector<AttentionResult>& results, int threads) {
  std::string text = peak_text(results.front(), threads);
  for (const AttentionResult& result : results) text += parts_text(result);
  return text;
}

namespace {

/// Results of one rank, a row for each of its slots.
struct RankResults {
  std::vector<int64_t> tokens;  ///< [slots], -1: padding
  Buffer<float> lse_values;
  AsFloat out, d_q, d_k, d_k_shared, d_v;
  /// Collective.
  explicit RankResults(AttentionCase& rank)
      : tokens(rank.shard().slots, -1),
        lse_values(rank.shard().slots * rank.workload().heads.heads),
        out(rank.executor().matrix(ArrayKind::out), rank.stream()),
        d_q(rank.executor().matrix(ArrayKind::d_q), rank.stream()),
        d_k(rank.executor().d_keys(), rank.stream(), own_key_columns(rank.workload().heads)),
        d_k_shared(rank.executor().d_keys(), rank.stream(),
                   shared_key_columns(rank.workload().heads)),
        d_v(rank.executor().d_values(), rank.stream()) {
    const int64_t heads = rank.workload().heads.heads;
    const std::vector<double> all_lse = rank.statistics(0);
    for (const TokenRow& own : token_rows(rank.workload(), rank.shard())) {
      tokens[own.row] = own.token;
      for (int64_t h = 0; h < heads; ++h)
        lse_values[own.row * heads + h] = static_cast<float>(all_lse[own.token * heads + h]);
    }
  }
};

/// Rows of several ranks one below the other; the rows of a single rank stay where they are.
class Stacked {
 public:
  explicit Stacked(const std::vector<MatrixView<const float>>& parts) : view_(parts.front()) {
    if (parts.size() == 1) return;
    view_.rows = 0;
    for (const MatrixView<const float>& part : parts) view_.rows += part.rows;
    values_ = Buffer<float>(view_.rows * view_.cols);
    float* to = values_.data();
    for (const MatrixView<const float>& part : parts)
      for (int64_t r = 0; r < part.rows; ++r, to += part.cols)
        std::copy_n(&part(r, 0), part.cols, to);
    view_.data = values_.data();
    view_.stride = view_.cols;
  }
  const MatrixView<const float>& view() const { return view_; }

 private:
  Buffer<float> values_;
  MatrixView<const float> view_;
};

}  // namespace

void write_results(OutputFile& output, AttentionRanks& subject, const std::string& input_sha256,
                   const Provenance& provenance) {
  const AttentionWorkload& workload = subject.first().workload();
  std::vector<std::optional<RankResults>> ranks(subject.size());
  size_t next = 0;  // ranks write their rows in any order
  subject.each([&](AttentionCase& rank) { ranks[next++].emplace(rank); });
  AttentionResultsHeader header;
  header.heads = workload.heads.heads;
  header.kv_heads = workload.heads.kv_heads;
  header.head_dim = workload.heads.head_dim;
  header.v_head_dim = workload.heads.value_dim();
  header.shared_key_dim = workload.heads.shared_key_dim;
  header.offsets = workload.offsets;
  header.gradients = true;
  header.d_sinks = subject.first().executor().d_sinks();
  header.input_sha256 = input_sha256;
  header.provenance = provenance;
  AttentionResultRows mine;
  for (const auto& rank : ranks)
    mine.tokens.insert(mine.tokens.end(), rank->tokens.begin(), rank->tokens.end());
  const auto stacked = [&](const auto& view_of) {
    std::vector<MatrixView<const float>> parts;
    for (const auto& rank : ranks) parts.push_back(view_of(*rank));
    return Stacked(parts);
  };
  const auto rows_of = [&](AsFloat RankResults::*array) {
    return stacked([&](const RankResults& rank) { return (rank.*array).view(); });
  };
  const Stacked out = rows_of(&RankResults::out), d_q = rows_of(&RankResults::d_q),
                d_k = rows_of(&RankResults::d_k), d_v = rows_of(&RankResults::d_v),
                d_k_shared = rows_of(&RankResults::d_k_shared),
                lse = stacked([&](const RankResults&rank) {
                  return rank.lse_values.matrix(std::ssize(rank.tokens), header.heads);
                });
  mine.out = out.view();
  mine.lse = lse.view();
  mine.d_q = d_q.view();
  mine.d_k = d_k.view();
  mine.d_k_shared = d_k_shared.view();
  mine.d_v = d_v.view();
  write_attention_results(output, header, mine);
}

int64_t writing_bytes(const AttentionOptions& o, const AttentionWorkload& workload, int ranks) {
  if (o.output.empty()) return 0;
  constexpr int64_t copies = 4, bytes = sizeof(float);
  const int64_t rows = ceil_div(workload.tokens(), int64_t{ranks});
  const int64_t widest =
      std::max(workload.width(InputTensor::q), workload.width(InputTensor::d_out));
  int64_t all = 0;  // out, d_q, d_k and d_v
  for (const InputTensor tensor :
       {InputTensor::d_out, InputTensor::q, InputTensor::k, InputTensor::v})
    all += workload.width(tensor);
  return (copies * widest + (o.replay ? all : 0)) * rows * bytes;
}

}  // namespace gyre
