#include "report/attention_case.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "report/attention_check.hpp"
#include "report/explain.hpp"
#include "report/plan_svg.hpp"

namespace gyre {
namespace {

class FileRows final : public TensorRows {
 public:
  explicit FileRows(const AttentionFile& file) : file_(file) {}
  void row(InputTensor tensor, int64_t token, std::span<float> to) const override {
    const std::vector<float>& all = tensor == InputTensor::q   ? file_.q
                                    : tensor == InputTensor::k ? file_.k
                                    : tensor == InputTensor::v ? file_.v
                                                               : file_.d_out;
    const auto width = std::ssize(to);
    std::copy_n(all.begin() + token * width, width, to.begin());
  }

 private:
  const AttentionFile& file_;
};

/// A matrix of attention arrays as f32.
class AsFloat {
 public:
  explicit AsFloat(const MatrixRef& from) : values_(from.rows * from.cols), cols_(from.cols) {
    for (int64_t r = 0; r < from.rows; ++r)
      for (int64_t c = 0; c < from.cols; ++c) values_[r * from.cols + c] = from.at(r, c);
  }
  MatrixView<const float> view() const {
    return values_.matrix(cols_ == 0 ? 0 : values_.size() / cols_, cols_);
  }

 private:
  Buffer<float> values_;
  int64_t cols_;
};

constexpr double default_tflops = 0.1, default_gbytes_per_s = 5, default_latency_us = 10;

MachineModel machine_of(const AttentionOptions& o) {
  MachineModel machine;
  machine.flops_per_s = 1e12 * (o.tflops > 0 ? o.tflops : default_tflops);
  machine.bytes_per_s = 1e9 * (o.gbytes_per_s > 0 ? o.gbytes_per_s : default_gbytes_per_s);
  machine.latency_s = 1e-6 * (o.latency_us > 0 ? o.latency_us : default_latency_us);
  return machine;
}

}  // namespace

AttentionCase made_up_case(const AttentionOptions& o, int64_t size) {
  AttentionCase problem;
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

AttentionCase case_of(const AttentionFile& file, AttentionOptions& o) {
  o.mask = file.causal ? "causal" : "full";
  AttentionCase problem;
  problem.heads = {file.heads, file.kv_heads, file.head_dim, static_cast<float>(file.scale)};
  problem.mask = {file.causal ? MaskKind::causal : MaskKind::full, file.window};
  problem.offsets = file.offsets;
  problem.sinks = file.sinks;
  problem.type = o.types().activations;
  problem.origin = o.input;
  return problem;
}

std::unique_ptr<TensorRows> rows_of(const AttentionFile& file) {
  return std::make_unique<FileRows>(file);
}

void write_results(OutputFile& output, AttentionRun& run, const std::string& input_sha256,
                   const Provenance& provenance, Communicator& world) {
  const AttentionCase& problem = run.problem();
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
  const AsFloat out(executor.matrix(ArrayKind::out)), d_q(executor.matrix(ArrayKind::d_q)),
      d_k(executor.d_keys()), d_v(executor.d_values());
  mine.out = out.view();
  mine.lse = lse.matrix(run.shard().slots, header.heads);
  mine.d_q = d_q.view();
  mine.d_k = d_k.view();
  mine.d_v = d_v.view();
  write_attention_results(output, header, mine);
}

Explanation explain_case(const AttentionCase& problem, const AttentionOptions& o) {
  const CaseLayout placed(problem, find_layout(o.layout), o.layout_options());
  const AttentionProblem planned{&placed.layout, problem.heads, problem.mask, o.schedule_options()};
  const Plan plan = plan_all(find_schedule(o.schedule), planned);
  const ExplainOptions options{-1, machine_of(o)};
  Explanation explanation{explain(plan, planned, o.types(), options), ""};
  if (o.svg.empty()) return explanation;
  std::vector<Simulation> directions;
  for (const Pass pass : o.passes())
    directions.push_back(simulate(plan, pass, problem.heads, o.types(), options.machine));
  explanation.svg = plan_svg(plan, planned, directions);
  return explanation;
}

}  // namespace gyre
