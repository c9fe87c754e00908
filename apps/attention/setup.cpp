#include "apps/attention/setup.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "apps/common/network_options.hpp"
#include "attention/kernels/emulated.hpp"
#include "attention/kernels/make_kernel.hpp"
#include "comm/agree.hpp"
#include "comm/nccl.hpp"
#include "core/error.hpp"
#include "core/index.hpp"
#include "harness/backend.hpp"
#include "io/schemas/attention_file.hpp"
#include "predict/machine_file.hpp"
#include "report/machine_report.hpp"
#include "report/value.hpp"

namespace gyre {
namespace {

/// With sinks every query must see a key: a row without keys would be taken for padding, whose
/// statistics are not updated. A file's log-sum-exp may be -inf only where a query sees no key.
void check_queries(const AttentionWorkload& workload, const AttentionFile& file) {
  const bool answered = file.reference && !file.reference->lse.empty();
  if (!answered && workload.sinks.empty()) return;
  const int64_t heads = workload.heads.heads;
  for (int64_t d = 0; d < workload.documents(); ++d) {
    const DocumentMask mask(workload.mask, d, workload.length(d));
    const auto row_of = [&](int64_t q) { return workload.query_row(d, workload.offsets[d] + q); };
    for (int64_t q = workload.length(d) - workload.queries_of(d); q < workload.length(d); ++q) {
      const int64_t keys = mask.keys_of(q);
      if (keys == 0 && !workload.sinks.empty())
        throw_usage(
            "the query at position {} of document {} sees no key; "
            "with sinks every query must see one",
            q, d);
      if (!answered || keys == 0) continue;
      for (int64_t h = 0; h < heads; ++h)
        if (std::isinf(file.reference->lse[row_of(q) * heads + h]))
          throw_usage(
              "{}: /reference/lse[{}, {}] is -inf, but the query at position {} of document {} "
              "sees {} keys; it must be finite",
              workload.origin, row_of(q), h, q, d, keys);
    }
  }
}

/// The regions of each document: those of the file, or of the keys that each query selects.
std::vector<std::vector<Region>> regions_of(const AttentionFile& file) {
  std::vector<std::vector<Region>> documents(file.offsets.size() - 1);
  for (size_t at = 0; at < file.regions.size(); at += attention_region_columns) {
    const int64_t* const row = &file.regions[at];
    documents[row[0]].push_back(
        {row[1], row[2], row[3], row[4], static_cast<RegionKind>(row[5]), row[6]});
  }
  auto next = file.selected_keys.begin();
  for (size_t d = 0; next != file.selected_keys.end() && d < documents.size(); ++d) {
    const int64_t length = file.offsets[d + 1] - file.offsets[d];
    for (int64_t query = length - file.queries_of(d); query < length; ++query) {
      std::vector<int64_t> keys(next, next + file.selected);
      next += file.selected;
      std::erase(keys, -1);
      std::ranges::sort(keys);
      append_selected(query, keys, documents[d]);
    }
  }
  return documents;
}

MaskRule mask_of(const AttentionFile& file, const std::string& path) {
  if (file.mask == "causal") return {MaskKind::causal, file.window};
  if (file.mask == "full") return {MaskKind::full};
  std::vector<int64_t> lengths;
  for (size_t d = 0; d + 1 < file.offsets.size(); ++d)
    lengths.push_back(file.offsets[d + 1] - file.offsets[d]);
  try {
    return MaskRule(MaskTable(regions_of(file), lengths));
  } catch (const Error& error) {
    throw_usage("{}: /attention/{}: {}", path, file.selected > 0 ? "selected_keys" : "regions",
                error.what());
  }
}

/// Pause between two polls of a sleeping rank. Measured: waking up for a poll takes some 15 us of a
/// core's time. With shorter pauses, polling ranks delay those that have work; with longer ones,
/// messages are found late.
double seconds_between_polls(const AppContext& context) {
  return std::max(50e-6, 12.5e-6 * ranks_per_core(context));
}

/// The kernel's time, from a rate or from the model in a machine file. Collective.
KernelTime kernel_time_of(Communicator& world, const AttentionOptions& o) {
  if (!names_machine(o.compute)) return parse_kernel_time(o.compute);
  std::string text;
  run_on_root(world, "--emulate-compute", [&] { text = read_machine_text(o.compute); });
  text = broadcast_string(world, text, 0);
  std::shared_ptr<const MachineModel> machine;
  const DType type = o.types().activations;
  run_agreed(world, "--emulate-compute", [&] {
    machine = std::make_shared<MachineModel>(parse_machine_model(o.compute, text));
    if (const std::string why = machine->kernel.why_not_selected();
        o.mask.selects_keys() && !why.empty())
      throw_usage("--mask {}: {}: {}", o.mask.mask, o.compute, why);
    for (const Pass pass : {Pass::forward, Pass::backward})
      if (const std::string why = machine->kernel.why_not(pass, type); !why.empty())
        throw_usage("{}: {}", o.compute, why);
  });
  return [machine, type](const KernelCall& call) {
    const BlockHeads& heads = call.input.heads;
    const ModelledCall modelled{.pass = call.pass,
                                .type = type,
                                .query_heads = heads.heads,
                                .head_dim = heads.head_dim,
                                .value_dim = heads.value_dim(),
                                .rectangles = call.input.rectangles,
                                .d_q = call.d_q,
                                .d_kv = call.d_kv,
                                .merged = call.merged};
    return call.input.rectangles.empty() ? 0 : machine->kernel.time(modelled).seconds;
  };
}

/// Bytes that a rank needs while results are written: four copies of its rows of the largest array
/// (sent, received, in file order, in MPI-IO), and its log-sum-exps. A replay first copies the rows
/// of all ranks into one array of each kind.
int64_t writing_bytes(const AttentionWorkload& workload, const AttentionSetup& setup) {
  constexpr int64_t copies = 4;
  int64_t widest = 0, all = 0;  // out, d_q, d_k and d_v
  for (const InputTensor like :
       {InputTensor::d_out, InputTensor::q, InputTensor::k, InputTensor::v}) {
    widest = std::max(widest, workload.width(like));
    all += workload.width(like);
  }
  const int64_t rows = ceil_div(workload.tokens(), int64_t{setup.layout_options.cp});
  const int64_t columns = copies * widest + workload.heads.heads + (setup.replays ? all : 0);
  return rows * columns * static_cast<int64_t>(sizeof(float));
}

}  // namespace

int64_t AttentionWorkload::longest() const {
  int64_t most = 0;
  for (int64_t d = 0; d < documents(); ++d) most = std::max(most, length(d));
  return most;
}

int64_t AttentionWorkload::pairs() const {
  return pairs_of_heads(offsets, mask, heads.heads);
}

AttentionWorkload generated_workload(const AttentionOptions& o, int64_t size) {
  AttentionWorkload workload;
  workload.heads = o.head_shape();
  workload.type = o.types().activations;
  std::vector<int64_t> lengths(o.batch, size);
  workload.origin = fmt::format("{} x {} tokens", o.batch, size);
  if (!o.generate.empty()) lengths = generated_lengths(o.generate, o.capacity, workload.origin);
  workload.offsets = o.mask.offsets_of(lengths);
  workload.query_offsets = o.mask.query_offsets_of(workload.offsets);
  workload.mask = o.mask.of(lengths);
  workload.pairs();  // throws when they cannot be counted
  if (o.sinks) workload.sinks = random_sinks(o.heads, o.seed);
  return workload;
}

AttentionWorkload workload_of(const AttentionFile& file, AttentionOptions& o) {
  o.mask.mask = file.mask;
  AttentionWorkload workload;
  workload.heads = {.heads = file.heads,
                    .kv_heads = file.kv_heads,
                    .head_dim = file.head_dim,
                    .scale = static_cast<float>(file.scale),
                    .v_head_dim = file.v_head_dim,
                    .shared_key_dim = file.shared_key_dim};
  workload.offsets = file.offsets;
  workload.query_offsets = file.query_offsets;
  workload.mask = mask_of(file, o.input);
  if (!file.query_offsets.empty())
    workload.mask = of_last_queries(workload.mask, file.offsets, file.query_offsets);
  workload.sinks = file.sinks;
  workload.origin = o.input;
  check_queries(workload, file);
  check_products(file, o.pass != "fwd");
  workload.type = o.types().activations;
  workload.score_size = sampled_score_size(workload, *rows_of(file, workload.type));
  return workload;
}

AttentionSetup setup_of(const AttentionOptions& o, const Schedule& schedule,
                        const LayoutKind& layout, int64_t memory_bytes, double peak_flops) {
  // On a GPU, statistics of all tokens and copies for a file are not in the arrays' memory.
  const bool on_host = !o.backend.on_gpu(), writes = !o.output.empty();
  return {.schedule = schedule,
          .layout = layout,
          .schedule_options = o.schedule_options(),
          .layout_options = o.layout_options(),
          .types = o.types(),
          .with_backward = o.pass != "fwd",
          .gathers_statistics = on_host && (writes || o.check != "none"),
          .writes = on_host && writes,
          .memory_bytes = memory_bytes,
          .cuda_graph = o.cuda_graph,
          .replays = o.replay,
          .only_sleeps = o.emulates_compute(),
          .peak_flops = peak_flops};
}

void prepare_graphs(const Communicator& network) {
  if (!network.can_record())
    throw_usage(
        "--cuda-graph: the host takes part in messages of --comm {}; a graph takes --comm nccl",
        network.backend());
  use_nccl_memory();
}

int64_t planned_bytes(const RankPlan& plan, const AttentionWorkload& workload,
                      const AttentionSetup& setup) {
  int64_t bytes = plan_bytes(plan), copies = 0;
  for (int kind = 0; kind < array_kinds; ++kind)
    if (setup.with_backward || kind <= own(ArrayKind::stats))
      bytes += stored_bytes(plan.arrays[kind], workload.heads, setup.types);
  copies = count(plan, Pass::forward, workload.heads, setup.types).transient_bytes;
  if (setup.with_backward)
    copies =
        std::max(copies, count(plan, Pass::backward, workload.heads, setup.types).transient_bytes);
  const int64_t planes = setup.with_backward ? 2 : 1;
  const auto statistics =
      static_cast<int64_t>(sizeof(double)) * planes * workload.tokens() * workload.heads.heads;
  return bytes + copies + (setup.gathers_statistics ? statistics : 0) +
         (setup.writes ? writing_bytes(workload, setup) : 0);
}

PlacedAttention::PlacedAttention(const AttentionWorkload& workload, const AttentionSetup& setup)
    : WorkloadLayout(workload, setup.layout, setup.layout_options),
      problem(problem_of(workload, setup.schedule_options)) {}

PlannedAttention::PlannedAttention(const AttentionWorkload& workload, const AttentionSetup& setup,
                                   int rank, std::shared_ptr<const PlacedAttention> placed_)
    : placed(placed_ ? std::move(placed_)
                     : std::make_shared<const PlacedAttention>(workload, setup)),
      plan(plan_rank(setup.schedule, placed->problem, rank)) {
  const int64_t bytes = planned_bytes(plan, workload, setup);
  if (setup.memory_bytes == 0 || bytes <= setup.memory_bytes) return;
  const double share = static_cast<double>(setup.memory_bytes) / static_cast<double>(bytes);
  throw_usage("schedule {}: needs {} a rank, and {} are available; about {:.0f} tokens fit",
              setup.schedule.name, si_text(bytes, "B"), si_text(setup.memory_bytes, "B"),
              std::floor(share * workload.tokens()));
}

std::vector<PlannedPtr> plan_workloads(const std::vector<AttentionWorkload>& workloads,
                                       const AttentionOptions& o, int64_t memory_bytes, int rank) {
  std::vector<PlannedPtr> plans(workloads.size());
  if (o.schedule.several() || o.layout.several()) return plans;
  const AttentionSetup setup =
      setup_of(o, find_schedule(o.schedule.name), find_layout(o.layout.name), memory_bytes);
  ConfigErrors errors;
  for (size_t i = 0; i < workloads.size(); ++i) {
    try {
      plans[i] = std::make_shared<const PlannedAttention>(workloads[i], setup, rank);
    } catch (const Error& error) {
      if (error.code() != ExitCode::usage) throw;
      errors.add("{} tokens: {}", workloads[i].tokens(), error.what());
    }
  }
  errors.throw_if_any("impossible configuration");
  return plans;
}

NetworkAndKernel make_network_and_kernel(AppContext& context, const AttentionOptions& o,
                                         Backend& backend) {
  std::unique_ptr<Communicator> emulated = make_network(context, o.network, backend);
  Communicator& network = emulated ? *emulated : backend.world();
  const KernelTime time = o.emulates_compute() ? kernel_time_of(context.world, o) : KernelTime();
  std::unique_ptr<BlockKernel> kernel;
  run_agreed(context.world, "--kernel", [&] {
    if (!o.emulates_compute()) {
      kernel = make_block_kernel(backend.stream(),
                                 {o.kernel, o.types().activations, o.threads, o.deterministic});
      return;
    }
    const double pause = seconds_between_polls(context);
    for (Communicator* waits : {&network, &context.world}) waits->sleep_between_polls(pause);
    kernel =
        make_emulated_kernel(time, {pause, [&network] { return network.next_event(); }, {}, {}});
  });
  return {std::move(emulated), network, std::move(kernel)};
}

}  // namespace gyre
