// GPU kernels against their limits, each measured in alternation with its baseline:
//
//     attention   the executor on one rank, causal, with cuDNN and with the tiled kernel. Baseline:
//                 cuDNN called directly with the same shapes; without cuDNN, the tiled kernel.
//                 Types are bf16, except log-sum-exps and the sums of dK and dV. FLOPs are those of
//                 visible pairs: 4 D forward, 10 D backward. If the executor's backward pass gives
//                 the same bits in every run ("fixed_order" of the shape), so does the baseline's,
//                 and cuDNN in any order is measured as well
//     rows        statistics and gradient of log-probability and entropy, in bf16, as stream work,
//                 and a call that ends with scores in pinned memory of the host, where its ids are
//                 too. Baseline: a device copy of the logits. Bytes are those that must be read
//                 and written
//     gather      shard maps of tokens. Baseline: a device copy of the tokens
//
//     bench-gpu-kernels [--json FILE] [--repetitions N] [--only GROUP] [--smoke]
//
// --smoke runs everything once with tiny shapes.

#include <fmt/format.h>

#include <chrono>
#include <ctime>
#include <random>

#include "attention/execute.hpp"
#include "attention/kernels/cuda_kernel.hpp"
#include "attention/kernels/cudnn_kernel.hpp"
#include "attention/schedules/registry.hpp"
#include "bare_cudnn.hpp"
#include "comm/cuda_device.hpp"
#include "comm/staged.hpp"
#include "core/version.hpp"
#include "logprobs/records/score_records.hpp"
#include "logprobs/rows/cuda_row_kernels.hpp"
#include "report/app.hpp"
#include "report/options.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/row_copy.hpp"
#include "sharding/layouts.hpp"
#include "timing.hpp"

namespace {

using namespace gyre;
using bench::Alternative;
using nlohmann::json;

struct BenchOptions {
  std::string json_file, only;
  int repetitions = 11;
  bool smoke = false;
};

struct Bench {
  const BenchOptions& o;
  Stream& stream;
  Communicator& network;
  bench::Suite& suite;
};

/// `count` bf16 values in device memory: a pool of normal numbers, repeated; other numbers for
/// another seed.
Buffer<bf16> random_values(Stream& stream, int64_t count, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<bf16> pool(std::min<int64_t>(count, (1 << 20) - 3));
  for (bf16& x : pool) x = to_bf16(normal(random));
  Buffer<bf16> values(count, MemorySpace::device);
  for (int64_t begin = 0; begin < count; begin += std::ssize(pool))
    stream.copy(values.data() + begin, pool.data(),
                std::min<int64_t>(std::ssize(pool), count - begin) * sizeof(bf16));
  stream.synchronize();
  return values;
}

/// One causal sequence with a plan for one rank.
class OneRank {
 public:
  OneRank(Bench& b, const HeadShape& heads, int64_t tokens, BlockKernel& kernel)
      : bounds_{0, static_cast<int32_t>(tokens)},
        layout_(find_layout("contiguous").make({bounds_, bounds_}, {})),
        problem_{&layout_, heads, {}, {}},
        plan_(plan_rank(find_schedule("ring"), problem_, 0)),
        executor_(plan_, heads, {DType::bf16, DType::bf16, DType::bf16, DType::f32}, b.network,
                  kernel, b.stream, workspace_, true) {
    const int64_t columns = heads.heads * heads.head_dim, kv = heads.kv_heads * heads.head_dim;
    fill(b.stream, executor_.matrix(ArrayKind::q), tokens * columns, 1);
    fill(b.stream, executor_.matrix(ArrayKind::kv), 2 * tokens * kv, 2);
    fill(b.stream, executor_.matrix(ArrayKind::d_out), tokens * columns, 4);
    executor_.run(Pass::forward);
  }
  /// Prepares and records both directions; later runs are one graph launch each.
  void use_graphs() {
    executor_.record_runs(true);
    for (int i = 0; i < 2; ++i)
      for (const Pass pass : {Pass::forward, Pass::backward}) executor_.run(pass);
  }
  AttentionExecutor& executor() { return executor_; }

 private:
  static void fill(Stream& stream, MatrixRef to, int64_t count, unsigned seed) {
    const Buffer<bf16> values = random_values(stream, count, seed);
    stream.copy(to.data, values.data(), count * sizeof(bf16));
    stream.synchronize();
  }

  std::vector<int32_t> bounds_;
  Layout layout_;
  AttentionProblem problem_;
  RankPlan plan_;
  AttentionWorkspace workspace_;
  AttentionExecutor executor_;
};

/// Arrays for cuDNN called directly.
struct BareMemory {
  Buffer<bf16> q, k, v, d_out, out, d_q, d_k, d_v;
  Buffer<float> lse;
  BareMemory(Stream& stream, const HeadShape& h, int64_t tokens)
      : q(random_values(stream, tokens * h.heads * h.head_dim)),
        k(random_values(stream, tokens * h.kv_heads * h.head_dim, 2)),
        v(random_values(stream, tokens * h.kv_heads * h.head_dim, 3)),
        d_out(random_values(stream, q.size(), 4)),
        out(q.size(), MemorySpace::device),
        d_q(q.size(), MemorySpace::device),
        d_k(k.size(), MemorySpace::device),
        d_v(k.size(), MemorySpace::device),
        lse(tokens * h.heads, MemorySpace::device) {}
  bench::BareArrays arrays() {
    return {q.data(),   k.data(),   v.data(),   d_out.data(), out.data(),
            lse.data(), d_q.data(), d_k.data(), d_v.data()};
  }
};

void attention_shape(Bench& b, int64_t head_dim, int64_t tokens) {
  HeadShape heads;
  heads.heads = b.o.smoke ? 2 : head_dim == 64 ? 64 : 32;  // 4096 columns, as in real models
  heads.kv_heads = b.o.smoke ? 1 : 8;
  heads.head_dim = head_dim;
  heads.scale = 1 / std::sqrt(static_cast<float>(head_dim));
  const double pairs = 0.5 * tokens * (tokens + 1) * (heads.heads * head_dim);
  const json shape = {{"tokens", tokens},
                      {"heads", heads.heads},
                      {"kv_heads", heads.kv_heads},
                      {"head_dim", head_dim}};

  json gradient_shape = shape;

  const std::unique_ptr<BlockKernel> tiled = make_cuda_kernel(b.stream);
  OneRank with_tiled(b, heads, tokens, *tiled);
  // Tiles as on a device with less shared memory: 16 rows per warp in forward instead of 32.
  const std::unique_ptr<BlockKernel> wide = make_cuda_kernel(b.stream, int64_t{100} << 10);
  OneRank with_wide(b, heads, tokens, *wide);
  std::vector<Alternative> forward, backward;
  const auto add_executor = [&](const std::string& name, AttentionExecutor& executor) {
    forward.push_back(
        {name, {}, 0, 4 * pairs, [&executor] { return executor.run(Pass::forward).total; }});
    backward.push_back(
        {name, {}, 0, 10 * pairs, [&executor] { return executor.run(Pass::backward).total; }});
  };
#ifdef GYRE_WITH_CUDNN
  BareMemory memory(b.stream, heads, tokens);
  const auto bare = bench::make_bare_cudnn(b.stream, heads, tokens, memory.arrays(), true),
             unordered = bench::make_bare_cudnn(b.stream, heads, tokens, memory.arrays(), false);
  forward.push_back({"cudnn", [&] { bare->forward(); }, 0, 4 * pairs});
  backward.push_back({"cudnn", [&] { bare->backward(); }, 0, 10 * pairs});
  if (bare->ordered())
    backward.push_back({"cudnn in any order", [&] { unordered->backward(); }, 0, 10 * pairs});
  gradient_shape["fixed_order"] = bare->ordered();
  const std::unique_ptr<BlockKernel> fused = make_cudnn_kernel(b.stream);
  OneRank with_fused(b, heads, tokens, *fused);
  OneRank fused_graph(b, heads, tokens, *fused);
  add_executor("executor cudnn", with_fused.executor());
  fused_graph.use_graphs();
  add_executor("executor cudnn, graph", fused_graph.executor());
#endif
  OneRank tiled_graph(b, heads, tokens, *tiled);
  add_executor("executor tiled", with_tiled.executor());
  add_executor("executor tiled, wide", with_wide.executor());
  tiled_graph.use_graphs();
  add_executor("executor tiled, graph", tiled_graph.executor());
  b.suite.measure("attention forward", shape, forward);
  b.suite.measure("attention backward", gradient_shape, backward);
#ifdef GYRE_WITH_CUDNN
  if (!fused->note().empty()) fmt::print("  cudnn: {}\n", fused->note());
#endif
}

void attention(Bench& b) {
  if (b.o.smoke) return attention_shape(b, 64, 128);
  for (const int64_t head_dim : {64, 128})
    for (const int64_t tokens : {8192, 16384, 32768}) attention_shape(b, head_dim, tokens);
}

void rows_of(Bench& b, int64_t columns) {
  const int64_t bytes = b.o.smoke ? 64 * 1024 : int64_t{2} << 30;
  const int64_t rows = bytes / 2 / columns;
  Buffer<bf16> logits = random_values(b.stream, rows * columns);
  Buffer<bf16> gradient(rows * columns, MemorySpace::device);
  const auto kernels = make_cuda_row_kernels(b.stream);
  std::vector<RowNormalizer> normalizers(rows, {4, 2});
  std::vector<GradientCoefficients> coefficients(rows, {0.5F, 0.25F});
  Buffer<int32_t> ids(rows, MemorySpace::pinned);
  std::vector<float> weights(rows, 1);
  for (int64_t i = 0; i < rows; ++i) ids[i] = static_cast<int32_t>(i * 7919 % columns);
  const auto records = std::make_unique<ScoreRecords>(
      *kernels, RecordShape{even_partition(columns, columns, 1), 0, 1, {.weighted = true}});
  Buffer<float> logprob(rows, MemorySpace::pinned), entropy(rows, MemorySpace::pinned);
  Buffer<RowNormalizer> found(rows, MemorySpace::pinned);
  const RowScores out = {found.span(), logprob.span(), entropy.span()};
  records->start(rows, ids.span(), out);
  RowPass pass;
  pass.columns = columns;
  const RowTokenIds token_ids = {ids.span(), weights, 1, 0};
  const MatrixRef from = logits.matrix(rows, columns), to = gradient.matrix(rows, columns);
  const double read = 2 * rows * columns;
  b.suite.measure(
      "rows", {{"rows", rows}, {"columns", columns}},
      {{"copy", [&] { b.stream.copy(gradient.data(), logits.data(), 2 * rows * columns); },
        2 * read},
       {"statistics", [&] { records->add(from, 0, 0, columns); }, read},
       {"scores on the host",
        [&] {
          records->start(rows, ids.span(), out);
          records->add(from, 0, 0, columns);
          records->merge(b.network, b.stream, "scores");
        },
        read},
       {"gradient",
        [&] { kernels->gradient(from, pass, normalizers, coefficients, token_ids, to); },
        2 * read}});
}

/// Slots of the stream in the order of the ranks that hold them.
std::vector<int32_t> shard_map(const Layout& layout) {
  std::vector<int32_t> map;
  for (const Shard& shard : layout.shards)
    for (const SlotRun& piece : shard.runs)
      for (int64_t i = 0; i < piece.length; ++i)
        map.push_back(static_cast<int32_t>((piece.start + i * piece.stride).value()));
  return map;
}

void gathers(Bench& b) {
  for (const char* name : {"dual-chunk-swap", "striped"})
    for (const int64_t row_bytes : {8192, 4}) {
      const int64_t smoke = row_bytes == 4 ? 1 << 16 : 256;
      const int64_t rows = b.o.smoke ? smoke : row_bytes == 4 ? int64_t{1} << 26 : 1 << 17;
      const std::vector<int32_t> bounds = {0, static_cast<int32_t>(rows)};
      LayoutOptions options;
      options.cp = 8;
      const std::vector<int32_t> order =
          shard_map(find_layout(name).make({bounds, bounds}, options));
      Buffer<int32_t> map(rows, MemorySpace::device);
      b.stream.copy(map.data(), order.data(), order.size() * sizeof(int32_t));
      const Buffer<bf16> from = random_values(b.stream, rows * row_bytes / 2);
      Buffer<bf16> to(from.size(), MemorySpace::device);
      const double bytes = rows * row_bytes;
      b.suite.measure("gather", {{"layout", name}, {"rows", rows}, {"row_bytes", row_bytes}},
                      {{"copy", [&] { b.stream.copy(to.data(), from.data(), bytes); }, 2 * bytes},
                       {"gather",
                        [&] {
                          gather_rows(b.stream, to.data(), from.data(), map.data(), rows, rows,
                                      row_bytes);
                        },
                        2 * bytes + 4.0 * rows}});
    }
}

std::string version_line() {
  const BuildInfo build = build_info();
  return fmt::format("gyre {} {} ({}), {}", build.version, build.git_sha, build.git_state,
                     build.compiler);
}

std::string utc_now() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

std::string json_text(const BenchOptions& o, const RankDevice& device, const bench::Suite& suite) {
  const json document = {{"program", "bench-gpu-kernels"},
                         {"version", version_line()},
                         {"date", utc_now()},
                         {"device", device.name},
                         {"compute_capability", fmt::format("{}.{}", device.major, device.minor)},
                         {"cuda", cuda_version()},
                         {"device_state", bench::device_state(device.device)},
                         {"repetitions", o.repetitions},
                         {"smoke", o.smoke},
                         {"results", suite.results()}};
  return document.dump(1) + "\n";
}

ExitCode run(AppContext& context, const BenchOptions& o) {
  if (context.world.size() != 1)
    throw_usage("bench-gpu-kernels runs on 1 rank, not {}", context.world.size());
  const std::vector<std::pair<std::string, std::function<void(Bench&)>>> groups = {
      {"attention", attention},
      {"rows",
       [](Bench& b) {
         for (const int64_t columns : {32768, 152064})
           rows_of(b, b.o.smoke ? columns / 64 : columns);
       }},
      {"gather", gathers}};
  if (!o.only.empty() &&
      std::none_of(groups.begin(), groups.end(), [&](const auto& g) { return g.first == o.only; }))
    throw_usage("--only {}: there are attention, rows and gather", o.only);

  plan_outputs(context);
  const RankDevice device = bind_device(context.world).front();
  const std::unique_ptr<Stream> stream = make_cuda_stream();
  const std::unique_ptr<Communicator> network = make_staged_communicator(context.world);
  fmt::print("# {} | {} | CUDA {}\n", version_line(), to_string(device), cuda_version());
  bench::Suite suite(*stream, {o.repetitions, o.smoke ? 0 : 3});
  Bench b{o, *stream, *network, suite};
  for (const auto& [name, group] : groups)
    if (o.only.empty() || o.only == name) group(b);
  context.outputs.add_text(o.json_file, json_text(o, device, suite));
  context.outputs.publish("");
  return ExitCode::ok;
}

}  // namespace

int main(int argc, char** argv) {
  BenchOptions o;
  return run_app(
      argc, argv,
      {"bench-gpu-kernels", "The GPU's kernels against their limits.",
       "Example: bench-gpu-kernels --json result.json"},
      [&](OptionTable& table) {
        const AddOptions add(table);
        add("-J,--json", "Write results here", o.json_file).writes_text();
        add("--repetitions", "Timed runs of each alternative; --smoke: 1", o.repetitions, 1);
        add("--only", "attention, rows or gather", o.only);
        add.flag("--smoke", "Tiny shapes: shows that everything runs", o.smoke);
      },
      [&](AppContext& context) {
        if (o.smoke) o.repetitions = 1;
        return run(context, o);
      });
}
