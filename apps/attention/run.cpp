#include "apps/attention/run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "comm/agree.hpp"
#include "report/value.hpp"
#include "runtime/clock.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

double median(std::span<const double> samples) {
  return quantile(samples, 0.5);
}

/// Times of one kind of run: an iteration is as slow as its slowest rank.
class Clocked {
 public:
  /// From a barrier; milliseconds.
  template <class Body>
  void time(Communicator& world, Body body) {
    HostStream stream;
    world.barrier(stream, "before an iteration")->wait();
    const Stopwatch watch;
    body();
    mine_.push_back(1e3 * watch.seconds());
  }
  Samples gather(Communicator& world) const { return gather_samples(world, mine_); }

 private:
  std::vector<double> mine_;
};

/// Medians over iterations, part by part.
ExecutionTimes medians(const std::vector<ExecutionTimes>& parts) {
  const auto of = [&](double ExecutionTimes::*part) {
    std::vector<double> values;
    for (const ExecutionTimes& times : parts) values.push_back(times.*part);
    return median(values);
  };
  return {of(&ExecutionTimes::compute), of(&ExecutionTimes::wait), of(&ExecutionTimes::copy),
          of(&ExecutionTimes::total)};
}

/// What communication adds, iteration by iteration: a machine that is slow for a while slows an
/// iteration and its compute alike.
void add_exposure(AttentionResult& row, const std::vector<double>& whole,
                  const std::vector<double>& compute) {
  std::vector<double> added;
  for (size_t i = 0; i < whole.size(); ++i) added.push_back(whole[i] - compute[i]);
  row.time_ms = summarize(whole);
  row.compute_ms = median(compute);
  row.exposed_ms = median(added);
  row.exposed_noise_ms = quantile(added, 0.75) - quantile(added, 0.25);
}

/// The rank's plan; a usage error if it needs more memory than it may.
RankPlan plan_that_fits(const AttentionWorkload& problem, const AttentionProblem& planned,
                        const AttentionSetup& setup, int rank) {
  RankPlan plan = plan_rank(setup.schedule, planned, rank);
  const int64_t bytes = planned_bytes(plan, problem, setup);
  if (setup.memory_bytes == 0 || bytes <= setup.memory_bytes) return plan;
  const double share = static_cast<double>(setup.memory_bytes) / static_cast<double>(bytes);
  throw_usage("schedule {}: needs {} a rank, and {} are available; about {:.0f} tokens fit",
              setup.schedule.name, si_text(static_cast<double>(bytes), "B"),
              si_text(static_cast<double>(setup.memory_bytes), "B"),
              std::floor(share * static_cast<double>(problem.tokens())));
}

}  // namespace

double AttentionResult::share_of_peak() const {
  return peak > 0 ? tflops_per_rank() * 1e12 / peak : std::nan("");
}

int64_t AttentionResult::messages() const {
  int64_t most = 0;
  for (const AttentionRankTimes& rank : ranks) most = std::max(most, rank.messages);
  return most;
}

int64_t AttentionResult::busiest_bytes() const {
  int64_t most = 0;
  for (const AttentionRankTimes& rank : ranks) most = std::max(most, rank.bytes_sent);
  return most;
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

int64_t planned_bytes(const RankPlan& plan, const AttentionWorkload& problem,
                      const AttentionSetup& setup) {
  int64_t bytes = 0, copies = 0;
  for (int kind = 0; kind < array_kinds; ++kind)
    if (setup.with_backward || kind <= own(ArrayKind::stats))
      bytes += stored_bytes(plan.arrays[static_cast<size_t>(kind)], problem.heads, setup.types);
  copies = count(plan, Pass::forward, problem.heads, setup.types).transient_bytes;
  if (setup.with_backward)
    copies =
        std::max(copies, count(plan, Pass::backward, problem.heads, setup.types).transient_bytes);
  const int64_t planes = setup.with_backward ? 2 : 1;
  const auto statistics =
      static_cast<int64_t>(sizeof(double)) * planes * problem.tokens() * problem.heads.heads;
  return bytes + copies + (setup.checks ? statistics : 0);
}

void check_plan(const AttentionWorkload& problem, const AttentionSetup& setup, int rank) {
  const WorkloadLayout placed(problem, setup.layout, setup.layout_options);
  plan_that_fits(problem, {&placed.layout, problem.heads, problem.mask, setup.schedule_options},
                 setup, rank);
}

AttentionRun::AttentionRun(const AttentionWorkload& problem, const TensorRows& inputs,
                           const AttentionSetup& setup, const AttentionMachine& machine)
    : problem_(problem),
      placed_(problem, setup.layout, setup.layout_options),
      planned_{&placed_.layout, problem.heads, problem.mask, setup.schedule_options},
      setup_(setup),
      plan_(plan_that_fits(problem, planned_, setup, machine.network.rank())),
      machine_(machine),
      executor_(plan_, problem.heads, setup.types, machine.network, machine.kernel, machine.stream,
                machine.workspace, setup.with_backward) {
  executor_.set_sinks(problem.sinks);
  const auto fill = [&](ArrayKind kind, std::initializer_list<InputTensor> planes) {
    HostFill array(executor_.matrix(kind), machine_.stream);
    int64_t column = 0;
    for (const InputTensor tensor : planes) {
      const int64_t width = problem.width(tensor);
      fill_rows(problem, inputs, tensor, shard(), array.matrix().columns_from(column, width));
      column += width;
    }
    array.upload();
  };
  fill(ArrayKind::q, {InputTensor::q});
  fill(ArrayKind::kv, {InputTensor::k, InputTensor::v});
  if (setup.with_backward) fill(ArrayKind::d_out, {InputTensor::d_out});
}

std::string AttentionRun::name() const {
  return fmt::format("{}, {}, {} tokens", setup_.schedule.name, layout().name, problem_.tokens());
}

AttentionTolerances AttentionRun::tolerances(Communicator& world) const {
  AttentionReductions lengths = attention_reductions(plan_, planned_, world);
  lengths.score_size = problem_.score_size;
  return attention_tolerances(lengths, setup_.types,
                              machine_.kernel.precision(setup_.types.activations));
}

void AttentionRun::check_counts(Verification& checks, Communicator& world) const {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const PlanCount mine = count(plan_, pass, problem_.heads, setup_.types);
    Verification counters;
    Check& check = counters.check(name() + ": counters", 0);
    const auto expect = [&](const char* what, int64_t counted, int64_t expected) {
      check.add(static_cast<double>(counted), static_cast<double>(expected), [&] {
        return fmt::format("{}, rank {}, {}: {} counted, {} expected", name_of(pass), plan_.rank,
                           what, counted, expected);
      });
    };
    expect("pairs of all ranks", all_reduce_value(world, mine.pairs, ReduceOp::sum),
           problem_.pairs());
    expect("bytes received by all ranks",
           all_reduce_value(world, mine.bytes_received, ReduceOp::sum),
           all_reduce_value(world, mine.bytes_sent, ReduceOp::sum));
    const ClosedForm form = setup_.schedule.closed_form({planned_, setup_.types, plan_.rank, pass});
    expect("messages", mine.messages, form.messages);
    expect("bytes sent", mine.bytes_sent, form.bytes_sent);
    expect("bytes received", mine.bytes_received, form.bytes_received);
    expect("transient bytes", mine.transient_bytes, form.transient_bytes);
    if (form.pairs) expect("pairs", mine.pairs, *form.pairs);
    counters.merge_over(world);
    checks.merge(counters);
  }
}

void AttentionRun::poison() {
  std::set<int> inputs;
  for (const ArrayKind kind : {ArrayKind::q, ArrayKind::kv, ArrayKind::d_out})
    inputs.insert(plan_.arrays[static_cast<size_t>(own(kind))].storage);
  for (const PlanArray& array : plan_.arrays) {
    if (inputs.contains(array.storage)) continue;
    if (!setup_.with_backward && array.kind > ArrayKind::stats) continue;
    const auto bytes = machine_.workspace.storage(
        array.storage, stored_bytes(array, problem_.heads, setup_.types));
    machine_.stream.fill(bytes.data(), std::byte{0xff}, bytes.size());  // NaN in every type
  }
}

void AttentionRun::prepare(Pass pass, bool poisoned) {
  if (poisoned) poison();
  if (pass == Pass::backward) executor_.run(Pass::forward);
}

void AttentionRun::check_traffic(Pass pass, const Traffic& before) {
  const PlanCount planned = count(plan_, pass, problem_.heads, setup_.types);
  const Traffic& after = machine_.network.traffic();
  GYRE_CHECK(after.bytes_sent - before.bytes_sent == planned.bytes_sent &&
                 after.messages - before.messages == planned.messages,
             "schedule {} sent {} bytes in {} messages, planned {} in {}", setup_.schedule.name,
             after.bytes_sent - before.bytes_sent, after.messages - before.messages,
             planned.bytes_sent, planned.messages);
}

AttentionResult AttentionRun::measure(Pass pass, const MeasureOptions& options, Communicator& world,
                                      const std::function<void()>& after) {
  set_current_step(fmt::format("{}, {}", name(), name_of(pass)));
  Clocked whole, compute, communicate;
  std::vector<ExecutionTimes> parts;
  for (int i = -options.warmup; i < options.iterations; ++i) {
    Clocked untimed;
    ExecutionTimes times;
    prepare(pass, static_cast<bool>(after));
    const Traffic before = machine_.network.traffic();
    (i < 0 ? untimed : whole).time(world, [&] { times = executor_.run(pass); });
    // The gradients of sinks are summed by a collective that is no part of the plan.
    if (problem_.sinks.empty()) check_traffic(pass, before);
    if (i >= 0) parts.push_back(times);
    if (i >= 0 && after) after();
    (i < 0 ? untimed : compute).time(world, [&] { executor_.run(pass, Execute::compute_only); });
    (i < 0 ? untimed : communicate).time(world, [&] {
      executor_.run(pass, Execute::communication_only);
    });
  }
  AttentionResult row;
  row.schedule = setup_.schedule.name;
  row.layout = layout().name;
  row.pass = pass;
  row.tokens = problem_.tokens();
  row.documents = problem_.documents();
  row.cp = layout().cp();
  row.samples_ms = whole.gather(world);
  row.communicate_ms = median(slowest_rank(communicate.gather(world)));
  add_exposure(row, slowest_rank(row.samples_ms), slowest_rank(compute.gather(world)));
  row.flops = attention_flops(pass, problem_.pairs(), problem_.heads.head_dim);
  row.peak = options.peak_flops;
  add_ranks(row, medians(parts), count(plan_, pass, problem_.heads, setup_.types), world);
  row.error_over_tolerance = std::nan("");
  row.check = "-";
  return row;
}

void AttentionRun::add_ranks(AttentionResult& row, const ExecutionTimes& mine,
                             const PlanCount& counted, Communicator& world) const {
  const std::vector<double> kernel = all_gather_value(world, 1e3 * mine.compute),
                            wait = all_gather_value(world, 1e3 * mine.wait),
                            copy = all_gather_value(world, 1e3 * mine.copy);
  const std::vector<int64_t> pairs = all_gather_value(world, counted.pairs),
                             bytes = all_gather_value(world, counted.bytes_sent),
                             messages = all_gather_value(world, counted.messages);
  for (size_t r = 0; r < kernel.size(); ++r) {
    row.ranks.push_back({kernel[r], wait[r], copy[r], pairs[r], bytes[r], messages[r]});
    row.wire_bytes += static_cast<double>(bytes[r]);
  }
  row.transient_bytes = all_reduce_value(world, counted.transient_bytes, ReduceOp::max);
}

void AttentionRun::repeat(Pass pass, Trace* trace) {
  set_current_step(fmt::format("{}, {}, once more", name(), name_of(pass)));
  prepare(pass, true);
  executor_.set_trace(trace);
  executor_.run(pass);
  executor_.set_trace(nullptr);
}

}  // namespace gyre
