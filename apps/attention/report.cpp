#include "apps/attention/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <utility>

#include "apps/common/network_options.hpp"
#include "apps/common/replay_options.hpp"
#include "attention/kernels/make_kernel.hpp"
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

/// The values of a matrix, or of some columns of each head, as f32 in host memory. They are copied,
/// unless they are the whole of an f32 matrix.
class AsFloat {
 public:
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
  const int64_t cases =
      o.automatic ? 1 : wanted(schedules(), o.schedule) * wanted(layout_kinds(), o.layout);
  return cases * std::ssize(o.passes());
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
  if (o.replay) report.unofficial_reasons.push_back(replay_reason(o.cp));
  if (!o.network.empty()) report.unofficial_reasons.push_back(network_reason(o.network));
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
  add_average(report.foms, "attention_rate", "TFLOP/s/rank", rates);
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

/// The array of results that `of` returns, in f32: the rows of this process's ranks, one rank after
/// the other. The rows of a single rank need no second copy.
class ResultRows {
 public:
  /// `part`: the columns that are wanted, if not all.
  ResultRows(AttentionRanks& ranks, const std::function<MatrixRef(AttentionExecutor&)>& of,
             const std::optional<HeadColumns>& part = {}) {
    int64_t rows = 0, at = 0;
    for (int64_t r = 0; r < ranks.size(); ++r) rows += of(ranks.rank(r).executor()).rows;
    for (int64_t r = 0; r < ranks.size(); ++r) {
      const MatrixRef from = of(ranks.rank(r).executor());
      AsFloat mine(from, ranks.rank(r).stream(), part.value_or(HeadColumns{1, from.cols}));
      view_ = mine.view();
      if (ranks.size() == 1) {
        only_ = std::move(mine);
        return;
      }
      if (values_.size() == 0) values_ = Buffer<float>(rows * view_.cols);
      for (int64_t i = 0; i < view_.rows; ++i, at += view_.cols)
        std::copy_n(&view_(i, 0), view_.cols, values_.data() + at);
    }
    view_ = {values_.data(), rows, view_.cols, view_.cols};
  }
  const MatrixView<const float>& view() const { return view_; }

 private:
  std::optional<AsFloat> only_;
  Buffer<float> values_;
  MatrixView<const float> view_;
};

/// The query, the token and the log-sum-exps of each slot of this process's ranks. Its constructor
/// is collective.
struct ResultTokens {
  std::vector<int64_t> queries, tokens;  ///< [rows]; -1 in slots of padding
  std::vector<float> lse;                ///< [rows of queries, heads]

  explicit ResultTokens(AttentionRanks& ranks) {
    const int64_t heads = ranks.rank(0).workload().heads.heads;
    std::vector<int64_t> first_query, first_key;  // first row of each rank
    for (int64_t r = 0; r < ranks.size(); ++r) {
      first_query.push_back(append(queries, ranks.rank(r), ArrayKind::q));
      first_key.push_back(append(tokens, ranks.rank(r), ArrayKind::kv));
    }
    lse.assign(queries.size() * heads, 0);
    ranks.each([&](AttentionCase& rank) {
      const AttentionWorkload& workload = rank.workload();
      const int64_t place = ranks.place_of(rank);
      const std::vector<double> all = rank.statistics(0);
      for (const TokenRow& own : token_rows(workload, rank.shard(ArrayKind::q))) {
        const int64_t row = first_query[place] + own.row;
        queries[row] = workload.query_row(own.document, own.token);
        for (int64_t h = 0; h < heads; ++h)
          lse[row * heads + h] = static_cast<float>(all[own.token * heads + h]);
      }
      for (const TokenRow& own : token_rows(workload, rank.shard(ArrayKind::kv)))
        tokens[first_key[place] + own.row] = own.token;
    });
  }

 private:
  /// Appends the rows of a rank, and returns the first.
  static int64_t append(std::vector<int64_t>& rows, const AttentionCase& rank, ArrayKind kind) {
    const int64_t first = std::ssize(rows);
    rows.resize(first + rank.shard(kind).slots, -1);
    return first;
  }
};

}  // namespace

void write_results(OutputFile& output, AttentionRanks& subject, const std::string& input_sha256,
                   const Provenance& provenance) {
  const AttentionWorkload& workload = subject.rank(0).workload();
  AttentionResultsHeader header;
  header.heads = workload.heads.heads;
  header.kv_heads = workload.heads.kv_heads;
  header.head_dim = workload.heads.head_dim;
  header.v_head_dim = workload.heads.value_dim();
  header.shared_key_dim = workload.heads.shared_key_dim;
  header.offsets = workload.offsets;
  header.query_offsets = workload.query_offsets;
  header.gradients = true;
  header.d_sinks = subject.rank(0).executor().d_sinks();
  header.input_sha256 = input_sha256;
  header.provenance = provenance;
  const ResultTokens rows(subject);
  const auto array = [](ArrayKind kind) {
    return [kind](AttentionExecutor& of) { return of.matrix(kind); };
  };
  const auto keys = [](AttentionExecutor& of) { return of.d_keys(); };
  const ResultRows out(subject, array(ArrayKind::out)), d_q(subject, array(ArrayKind::d_q)),
      d_k(subject, keys, own_key_columns(workload.heads)),
      d_k_shared(subject, keys, shared_key_columns(workload.heads)),
      d_v(subject, [](AttentionExecutor&of) { return of.d_values(); });
  AttentionResultRows mine;
  mine.queries = rows.queries;
  mine.tokens = rows.tokens;
  mine.out = out.view();
  mine.lse = {rows.lse.data(), std::ssize(rows.queries), header.heads, header.heads};
  mine.d_q = d_q.view();
  mine.d_k = d_k.view();
  mine.d_k_shared = d_k_shared.view();
  mine.d_v = d_v.view();
  write_attention_results(output, header, mine);
}

}  // namespace gyre
