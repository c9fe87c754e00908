#include "apps/attention/workload.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "apps/attention/check.hpp"
#include "apps/common/generated_lengths.hpp"
#include "predict/explain.hpp"
#include "predict/plan_svg.hpp"

namespace gyre {
namespace {

class FileRows final : public TensorRows {
 public:
  FileRows(const AttentionFile& file, DType type) : file_(file), round_(type == DType::bf16) {}
  void row(InputTensor tensor, int64_t token, std::span<float> to) const override {
    const std::vector<float>& all = tensor == InputTensor::q   ? file_.q
                                    : tensor == InputTensor::k ? file_.k
                                    : tensor == InputTensor::v ? file_.v
                                                               : file_.d_out;
    const auto width = std::ssize(to);
    std::copy_n(all.begin() + token * width, width, to.begin());
    if (!round_) return;
    for (float& value : to) value = to_float(to_bf16(value));
  }

 private:
  const AttentionFile& file_;
  bool round_;
};

/// A matrix of attention arrays as f32.
class AsFloat {
 public:
  AsFloat(const MatrixRef& from, Stream& stream)
      : values_(from.rows * from.cols), cols_(from.cols) {
    const HostCopy here(from, stream);
    for (int64_t r = 0; r < from.rows; ++r)
      for (int64_t c = 0; c < from.cols; ++c) values_[r * from.cols + c] = here.at(r, c);
  }
  MatrixView<const float> view() const {
    return values_.matrix(cols_ == 0 ? 0 : values_.size() / cols_, cols_);
  }

 private:
  Buffer<float> values_;
  int64_t cols_;
};

MachineModel machine_of(const AttentionOptions& o) {
  MachineModel machine;
  machine.flops_per_s = 1e12 * o.tflops;
  machine.bytes_per_s = 1e9 * o.gbytes_per_s;
  machine.latency_s = 1e-6 * o.latency_us;
  return machine;
}

constexpr int64_t most_plan_entries = int64_t{30} << 20;

/// Arrays, steps, messages, slices and rectangles of a plan: what its memory is proportional to.
int64_t entries_of(const RankPlan& plan) {
  int64_t entries = 0;
  for (const PlanArray& array : plan.arrays) entries += 1 + std::ssize(array.rows);
  for (const std::vector<Step>* steps : {&plan.forward, &plan.backward})
    for (const Step& step : *steps) {
      ++entries;
      if (const auto* compute = std::get_if<step::Compute>(&step))
        entries += std::ssize(compute->rectangles);
      if (const auto* exchange = std::get_if<step::Exchange>(&step))
        for (const auto* messages : {&exchange->sends, &exchange->recvs})
          for (const Message& message : *messages) entries += 1 + std::ssize(message.slices);
    }
  return entries;
}

/// Entries of the plans of all ranks, from those of three of them.
int64_t estimated_entries(const AttentionWorkload& problem, const AttentionOptions& o, int cp) {
  LayoutOptions options = o.layout_options();
  options.cp = cp;
  const WorkloadLayout placed(problem, find_layout(o.layout.name), options);
  const AttentionProblem planned{&placed.layout, problem.heads, problem.mask, o.schedule_options()};
  int64_t most = 0;
  for (const int rank : {0, cp / 2, cp - 1})
    most = std::max(most, entries_of(plan_rank(find_schedule(o.schedule.name), planned, rank)));
  return most * cp;
}

void check_plan_size(const AttentionWorkload& problem, const AttentionOptions& o) {
  constexpr int always = 64;
  const auto fits = [&](int cp) {
    return cp <= always || estimated_entries(problem, o, cp) <= most_plan_entries;
  };
  // From small to large: plans of one rank that are too large need not be made.
  int largest = std::min(always, o.cp);
  while (largest < o.cp && fits(std::min(2 * largest, o.cp))) largest = std::min(2 * largest, o.cp);
  if (largest < o.cp)
    throw_usage(
        "--cp {}: the plans of all ranks under {} are too large to be explained; {} ranks work",
        o.cp, o.schedule.name, largest);
}

}  // namespace

AttentionWorkload generated_workload(const AttentionOptions& o, int64_t size) {
  AttentionWorkload problem;
  problem.heads = o.head_shape();
  problem.mask = o.mask_rule();
  problem.type = o.types().activations;
  problem.offsets = {0};
  std::vector<int64_t> lengths(static_cast<size_t>(o.batch), size);
  problem.origin = fmt::format("{} x {} tokens", o.batch, size);
  if (!o.generate.empty()) lengths = generated_lengths(o.generate, o.capacity, problem.origin);
  for (const int64_t length : lengths) problem.offsets.push_back(problem.offsets.back() + length);
  if (o.sinks) problem.sinks = random_sinks(o.heads, static_cast<uint64_t>(o.seed));
  return problem;
}

AttentionWorkload workload_of(const AttentionFile& file, AttentionOptions& o) {
  o.mask = file.causal ? "causal" : "full";
  AttentionWorkload problem;
  problem.heads = {file.heads, file.kv_heads, file.head_dim, static_cast<float>(file.scale)};
  problem.mask = {file.causal ? MaskKind::causal : MaskKind::full, file.window};
  problem.offsets = file.offsets;
  problem.sinks = file.sinks;
  problem.type = o.types().activations;
  problem.origin = o.input;
  problem.score_size = sampled_score_size(problem, *rows_of(file, problem.type));
  return problem;
}

std::unique_ptr<TensorRows> rows_of(const AttentionFile& file, DType type) {
  return std::make_unique<FileRows>(file, type);
}

bool has_exact_inputs(const AttentionFile& file, DType type) {
  if (type != DType::bf16) return true;
  for (const std::vector<float>* values : {&file.q, &file.k, &file.v, &file.d_out})
    for (const float value : *values)
      if (to_float(to_bf16(value)) != value) return false;
  return true;
}

AttentionSetup setup_of(const AttentionOptions& o, const Schedule& schedule,
                        const LayoutKind& layout, int64_t memory_bytes) {
  const bool checks_here = o.check != "none" && !o.backend.on_gpu();  // else in the host's memory
  return {schedule,  layout,          o.schedule_options(), o.layout_options(),
          o.types(), o.pass != "fwd", checks_here,          memory_bytes};
}

void check_workloads(const std::vector<AttentionWorkload>& cases, const AttentionOptions& o,
                     int64_t memory_bytes, int rank) {
  if (o.schedule.all() || o.layout.all()) return;
  const AttentionSetup setup =
      setup_of(o, find_schedule(o.schedule.name), find_layout(o.layout.name), memory_bytes);
  ConfigErrors problems;
  for (const AttentionWorkload& problem : cases) {
    try {
      check_plan(problem, setup, rank);
    } catch (const Error& error) {
      if (error.code() != ExitCode::usage) throw;
      problems.add("{} tokens: {}", problem.tokens(), error.what());
    }
  }
  problems.throw_if_any("impossible configuration");
}

void write_results(OutputFile& output, AttentionRun& run, const std::string& input_sha256,
                   const Provenance& provenance, Communicator& world) {
  const AttentionWorkload& problem = run.problem();
  AttentionExecutor& executor = run.executor();
  const std::vector<double> all_lse = gather_statistics(run, 0, world);
  AttentionResultsHeader header;
  header.heads = problem.heads.heads;
  header.kv_heads = problem.heads.kv_heads;
  header.head_dim = problem.heads.head_dim;
  header.offsets = problem.offsets;
  header.gradients = true;
  header.d_sinks = executor.d_sinks();
  header.input_sha256 = input_sha256;
  header.provenance = provenance;
  AttentionResultRows mine;
  mine.tokens.assign(static_cast<size_t>(run.shard().slots), -1);
  Buffer<float> lse(run.shard().slots * header.heads);
  for (const TokenRow& own : token_rows(problem, run.shard())) {
    mine.tokens[static_cast<size_t>(own.row)] = own.token;
    for (int64_t h = 0; h < header.heads; ++h)
      lse[own.row * header.heads + h] =
          static_cast<float>(all_lse[static_cast<size_t>(own.token * header.heads + h)]);
  }
  const AsFloat out(executor.matrix(ArrayKind::out), run.stream()),
      d_q(executor.matrix(ArrayKind::d_q), run.stream()), d_k(executor.d_keys(), run.stream()),
      d_v(executor.d_values(), run.stream());
  mine.out = out.view();
  mine.lse = lse.matrix(run.shard().slots, header.heads);
  mine.d_q = d_q.view();
  mine.d_k = d_k.view();
  mine.d_v = d_v.view();
  write_attention_results(output, header, mine);
}

Explanation explain_workload(const AttentionWorkload& problem, const AttentionOptions& o) {
  check_plan_size(problem, o);
  const WorkloadLayout placed(problem, find_layout(o.layout.name), o.layout_options());
  const AttentionProblem planned{&placed.layout, problem.heads, problem.mask, o.schedule_options()};
  const Plan plan = plan_all(find_schedule(o.schedule.name), planned);
  std::vector<Simulation> directions;
  for (const Pass pass : o.passes())
    directions.push_back(simulate(plan, pass, problem.heads, o.types(), machine_of(o)));
  Explanation explanation{explain(plan, planned, o.types(), directions), ""};
  explanation.text += fmt::format(
      "# times are of a model: a rank computes {} TFLOP/s, sends {} GB/s, latency {} us\n",
      o.tflops, o.gbytes_per_s, o.latency_us);
  if (!o.svg.empty()) explanation.svg = plan_svg(plan, planned, directions);
  return explanation;
}

}  // namespace gyre
