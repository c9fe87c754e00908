#include "apps/attention/case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "comm/agree.hpp"
#include "core/checksum.hpp"
#include "runtime/clock.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

double median(std::span<const double> samples) {
  return quantile(samples, 0.5);
}

/// Median of one part of the times over iterations.
double median_of(const std::vector<ExecutionTimes>& times, double ExecutionTimes::*part) {
  std::vector<double> values;
  for (const ExecutionTimes& one : times) values.push_back(one.*part);
  return median(values);
}

}  // namespace

double AttentionResult::share_of_peak() const {
  return peak > 0 ? tflops_per_rank() * 1e12 / peak : std::nan("");
}

double AttentionResult::kernel_imbalance() const {
  std::vector<double> times;
  for (const AttentionRankTimes& rank : ranks) times.push_back(rank.kernel_ms);
  return imbalance(times);
}

double AttentionResult::exposed() const {
  return wire_bytes > 0 ? exposed_ms / time_ms.median : std::nan("");
}

double AttentionResult::overlap() const {
  if (!(wire_bytes > 0) || exposed_noise_ms > communicate_ms) return std::nan("");
  return std::clamp(1 - exposed_ms / communicate_ms, 0.0, 1.0);
}

std::vector<std::tuple<std::string, Value, std::string>> AttentionResult::further() const {
  std::vector<std::tuple<std::string, Value, std::string>> all{
      {"compute_only", compute_ms, "ms"},
      {"communication_only", communicate_ms, "ms"},
      {"exposed_time", exposed_ms, "ms"},
      {"exposed_noise", exposed_noise_ms, "ms"}};
  if (predicted_ms > 0) all.emplace_back("predicted", predicted_ms, "ms");
  if (graph_operations > 0)
    all.emplace_back("graph_operations", static_cast<double>(graph_operations), "");
  return all;
}

AttentionCase::AttentionCase(const AttentionWorkload& workload, PlannedPtr planned,
                             const AttentionSetup& setup, const AttentionMachine& machine,
                             const AttentionExpectation& expected)
    : workload_(workload),
      planned_(std::move(planned)),
      plan_(planned_->plan),
      setup_(setup),
      machine_(machine),
      expected_(expected) {}

void AttentionCase::allocate() {
  executor_.emplace(plan_, workload_.heads, setup_.types, machine_.network, machine_.kernel,
                    machine_.stream, machine_.workspace, setup_.with_backward);
  executor_->set_sinks(workload_.sinks);
  executor_->record_runs(setup_.cuda_graph);
  overwrite(std::byte{0});  // kernels that are timed alone read arrays that no message has filled
  const auto fill = [&](ArrayKind kind, std::initializer_list<InputTensor> planes) {
    HostFill array(executor_->matrix(kind), machine_.stream);
    int64_t column = 0;
    for (const InputTensor tensor : planes) {
      const int64_t width = workload_.width(tensor);
      fill_rows(workload_, expected_.inputs, tensor, shard(kind),
                array.matrix().columns_from(column, width));
      column += width;
    }
    array.upload();
  };
  fill(ArrayKind::q, {InputTensor::q});
  fill(ArrayKind::kv, {InputTensor::k, InputTensor::v});
  if (setup_.with_backward) fill(ArrayKind::d_out, {InputTensor::d_out});
}

std::string AttentionCase::name() const {
  return fmt::format("{}, {}, {} tokens", setup_.schedule.name, layout().name, workload_.tokens());
}

std::string AttentionCase::label(Pass pass) const {
  return fmt::format("{}, {}", name(), name_of(pass));
}

AttentionResult AttentionCase::row(Pass pass, int cycle) const {
  AttentionResult row;
  row.schedule = setup_.schedule.name;
  row.layout = layout().name;
  row.pass = pass;
  row.tokens = workload_.tokens();
  row.cp = layout().cp();
  row.replayed = setup_.replays;
  row.key = {{"schedule", row.schedule},
             {"layout", row.layout},
             {"pass", std::string(name_of(pass))},
             {"tokens", row.tokens},
             {"cp", int64_t{row.cp}}};
  if (row.replayed) row.key.emplace_back("replay", true);
  if (cycle > 1) row.key.emplace_back("cycle", int64_t{cycle});
  return row;
}

std::pair<AttentionTolerances, AttentionTolerances> AttentionCase::tolerances() const {
  AttentionReductions lengths =
      attention_reductions(plan_, planned_->placed->problem, machine_.world);
  lengths.score_size = workload_.score_size;
  const KernelPrecision kernel = machine_.kernel.precision(setup_.types.activations);
  return {attention_tolerances(lengths, setup_.types, kernel),
          attention_sigmas(lengths, setup_.types, kernel)};
}

void AttentionCase::check_counts(Verification& checks) const {
  Communicator& world = machine_.world;
  Verification counters;
  Check& check = counters.check(name() + ": counters", 0);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const PlanCount mine = count(plan_, pass, workload_.heads, setup_.types);
    const auto expect = [&](const char* what, int64_t counted, int64_t expected) {
      check.add(counted, expected, [&] {
        return fmt::format("{}, rank {}, {}: {} counted, {} expected", name_of(pass), plan_.rank,
                           what, counted, expected);
      });
    };
    expect("pairs of all ranks", all_reduce_value(world, mine.pairs, ReduceOp::sum),
           workload_.pairs());
    expect("bytes received by all ranks",
           all_reduce_value(world, mine.bytes_received, ReduceOp::sum),
           all_reduce_value(world, mine.bytes_sent, ReduceOp::sum));
    const ClosedForm form =
        setup_.schedule.closed_form({planned_->placed->problem, setup_.types, plan_.rank, pass});
    expect("messages", mine.messages, form.messages);
    expect("bytes sent", mine.bytes_sent, form.bytes_sent);
    expect("bytes received", mine.bytes_received, form.bytes_received);
    expect("transient bytes", mine.transient_bytes, form.transient_bytes);
    if (form.pairs) expect("pairs", mine.pairs, *form.pairs);
  }
  counters.merge_over(world);
  checks.merge_repeat(counters);
}

void AttentionCase::overwrite(std::byte value) {
  std::set<int> inputs;
  for (const ArrayKind kind : {ArrayKind::q, ArrayKind::kv, ArrayKind::d_out})
    inputs.insert(plan_.arrays[own(kind)].storage);
  for (const PlanArray& array : plan_.arrays) {
    if (inputs.contains(array.storage)) continue;
    if (!setup_.with_backward && array.kind > ArrayKind::stats) continue;
    const auto bytes = machine_.workspace.storage(
        array.storage, stored_bytes(array, workload_.heads, setup_.types));
    machine_.stream.fill(bytes.data(), value, bytes.size());
  }
}

void AttentionCase::begin(Pass pass) {
  const PlanCount planned = count(plan_, pass, workload_.heads, setup_.types);
  planned_sent_ = {planned.messages, planned.bytes_sent};
}

void AttentionCase::prepare(Pass pass, bool poisoned) {
  if (poisoned) overwrite(std::byte{0xff});  // NaN in every type
  if (pass == Pass::backward) executor_->run(Pass::forward);
}

void AttentionCase::run(Pass pass) {
  const SentTraffic before = sent();
  times_.push_back(executor_->run(pass));
  graph_operations_ = std::min(graph_operations_, executor_->replayed());
  // A collective that is not part of the plan sums the gradients of sinks.
  if (!workload_.sinks.empty()) return;
  const SentTraffic now = sent() - before;
  GYRE_CHECK(now == planned_sent_, "schedule {} sent {} bytes in {} messages, planned {} in {}",
             setup_.schedule.name, now.bytes, now.messages, planned_sent_.bytes,
             planned_sent_.messages);
}

SentTraffic AttentionCase::sent() const {
  const Traffic traffic = machine_.network.traffic();
  return {traffic.messages, traffic.bytes_sent};
}

void AttentionCase::start_timing(Pass) {
  compute_ms_.clear();
  communicate_ms_.clear();
  times_.clear();
  graph_operations_ = std::numeric_limits<int64_t>::max();
}

void AttentionCase::time_part(Pass pass, Execute part, std::vector<double>& to) {
  HostStream host;
  machine_.world.barrier(host, "before an iteration")->wait();
  const Stopwatch watch;
  executor_->run(pass, part);
  to.push_back(1e3 * watch.seconds());
}

void AttentionCase::run_parts(Pass pass, bool ahead) {
  if (ahead) prepare(pass, false);
  time_part(pass, Execute::compute_only, compute_ms_);
  time_part(pass, Execute::communication_only, communicate_ms_);
}

std::optional<uint64_t> AttentionCase::checksum(Pass pass) {
  if (machine_.stream.space() != MemorySpace::host) return {};
  Checksum sum;
  const auto add = [&](ArrayKind kind, const std::vector<MatrixRef>& results) {
    for (const TokenRow& own : token_rows(workload_, shard(kind)))
      for (const MatrixRef& matrix : results)
        sum.add({matrix.data + own.row * matrix.stride * size_of(matrix.type),
                 static_cast<size_t>(matrix.cols) * size_of(matrix.type)});
  };
  const ArrayKind of_queries = pass == Pass::forward ? ArrayKind::out : ArrayKind::d_q;
  add(of_queries, {executor_->matrix(of_queries)});
  if (pass == Pass::backward) add(ArrayKind::d_kv, {executor_->d_keys(), executor_->d_values()});
  if (pass == Pass::backward) sum.add(bytes_of(std::span<const double>(executor_->d_sinks())));
  return sum.value();
}

void AttentionCase::complete_parts(AttentionResult& row) const {
  if (row.replayed) {
    for (double* part :
         {&row.compute_ms, &row.communicate_ms, &row.exposed_ms, &row.exposed_noise_ms})
      *part = std::nan("");
    return;
  }
  const auto slowest = [&](const std::vector<double>& mine) {
    return slowest_rank(gather_samples(machine_.world, mine));
  };
  // Exposed communication is the median difference of each iteration and its compute. A temporary
  // slowdown of the machine affects both alike.
  const std::vector<double> compute = slowest(compute_ms_);
  std::vector<double> added = slowest_rank(row.timing.samples_ms);
  for (size_t i = 0; i < added.size(); ++i) added[i] -= compute[i];
  row.compute_ms = median(compute);
  row.communicate_ms = median(slowest(communicate_ms_));
  row.exposed_ms = median(added);
  row.exposed_noise_ms = quantile(added, 0.75) - quantile(added, 0.25);
}

void AttentionCase::complete(AttentionResult& row) const {
  Communicator& world = machine_.world;
  complete_parts(row);
  row.flops = attention_flops(row.pass, workload_.pairs(), workload_.heads);
  row.peak = setup_.peak_flops;
  row.graph_operations = graph_operations_;
  row.graph_windows = executor_->windows();

  const PlanCount counted = count(plan_, row.pass, workload_.heads, setup_.types);
  const auto parts = [&](double ExecutionTimes::*part) {
    return all_gather_value(world, 1e3 * median_of(times_, part));
  };
  const std::vector<double> kernel = parts(&ExecutionTimes::compute),
                            wait = parts(&ExecutionTimes::wait),
                            copy = parts(&ExecutionTimes::copy);
  const std::vector<int64_t> pairs = all_gather_value(world, counted.pairs),
                             bytes = all_gather_value(world, counted.bytes_sent),
                             messages = all_gather_value(world, counted.messages);
  row.messages = row.bytes_sent = 0;
  row.wire_bytes = 0;
  for (size_t r = 0; r < kernel.size(); ++r) {
    const double waited = row.replayed ? std::nan("") : wait[r];  // other ranks had the turn
    row.ranks.push_back({kernel[r], waited, copy[r], pairs[r], bytes[r], messages[r]});
    row.messages = std::max(row.messages, messages[r]);
    row.bytes_sent = std::max(row.bytes_sent, bytes[r]);
    row.wire_bytes += bytes[r];
  }
  row.transient_bytes = all_reduce_value(world, counted.transient_bytes, ReduceOp::max);
}

void AttentionCase::record(Pass pass, Trace& trace) {
  set_current_step(label(pass) + ", for the timeline");
  prepare(pass, true);
  executor_->set_trace(&trace);
  executor_->run(pass);
  executor_->set_trace(nullptr);
}

}  // namespace gyre
