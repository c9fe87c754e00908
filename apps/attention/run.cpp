#include "apps/attention/run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "comm/agree.hpp"
#include "core/checksum.hpp"
#include "report/result.hpp"
#include "runtime/clock.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

double median(std::span<const double> samples) {
  return quantile(samples, 0.5);
}

/// Times of the iterations of one kind of run, on this rank.
class Clocked {
 public:
  /// Times `body` in milliseconds, from a barrier on.
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

/// Sets the exposed communication: the median of the differences of each iteration and its compute.
/// A machine that is slow for a while slows both alike.
void add_exposure(AttentionResult& result, const std::vector<double>& whole,
                  const std::vector<double>& compute) {
  std::vector<double> added;
  for (size_t i = 0; i < whole.size(); ++i) added.push_back(whole[i] - compute[i]);
  result.time_ms = summarize(whole);
  result.compute_ms = median(compute);
  result.exposed_ms = median(added);
  result.exposed_noise_ms = quantile(added, 0.75) - quantile(added, 0.25);
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

AttentionRun::AttentionRun(const AttentionWorkload& workload, const AttentionSetup& setup,
                           const AttentionMachine& machine)
    : workload_(workload),
      placed_(workload, setup.layout, setup.layout_options),
      planned_{&placed_.layout, workload.heads, workload.mask, setup.schedule_options},
      setup_(setup),
      plan_(plan_that_fits(workload, planned_, setup, machine.network.rank())),
      machine_(machine) {}

void AttentionRun::allocate(const TensorRows& inputs) {
  executor_.emplace(plan_, workload_.heads, setup_.types, machine_.network, machine_.kernel,
                    machine_.stream, machine_.workspace, setup_.with_backward);
  executor_->set_sinks(workload_.sinks);
  executor_->record_runs(setup_.cuda_graph);
  overwrite(std::byte{0});  // what is timed without messages reads what no message has brought yet
  const auto fill = [&](ArrayKind kind, std::initializer_list<InputTensor> planes) {
    HostFill array(executor_->matrix(kind), machine_.stream);
    int64_t column = 0;
    for (const InputTensor tensor : planes) {
      const int64_t width = workload_.width(tensor);
      fill_rows(workload_, inputs, tensor, shard(), array.matrix().columns_from(column, width));
      column += width;
    }
    array.upload();
  };
  fill(ArrayKind::q, {InputTensor::q});
  fill(ArrayKind::kv, {InputTensor::k, InputTensor::v});
  if (setup_.with_backward) fill(ArrayKind::d_out, {InputTensor::d_out});
}

std::string AttentionRun::name() const {
  return fmt::format("{}, {}, {} tokens", setup_.schedule.name, layout().name, workload_.tokens());
}

AttentionTolerances AttentionRun::tolerances(Communicator& world) const {
  AttentionReductions lengths = attention_reductions(plan_, planned_, world);
  lengths.score_size = workload_.score_size;
  return attention_tolerances(lengths, setup_.types,
                              machine_.kernel.precision(setup_.types.activations));
}

void AttentionRun::check_counts(Verification& checks, Communicator& world) const {
  Verification counters;
  Check& check = counters.check(name() + ": counters", 0);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const PlanCount mine = count(plan_, pass, workload_.heads, setup_.types);
    const auto expect = [&](const char* what, int64_t counted, int64_t expected) {
      check.add(static_cast<double>(counted), static_cast<double>(expected), [&] {
        return fmt::format("{}, rank {}, {}: {} counted, {} expected", name_of(pass), plan_.rank,
                           what, counted, expected);
      });
    };
    expect("pairs of all ranks", all_reduce_value(world, mine.pairs, ReduceOp::sum),
           workload_.pairs());
    expect("bytes received by all ranks",
           all_reduce_value(world, mine.bytes_received, ReduceOp::sum),
           all_reduce_value(world, mine.bytes_sent, ReduceOp::sum));
    const ClosedForm form = setup_.schedule.closed_form({planned_, setup_.types, plan_.rank, pass});
    expect("messages", mine.messages, form.messages);
    expect("bytes sent", mine.bytes_sent, form.bytes_sent);
    expect("bytes received", mine.bytes_received, form.bytes_received);
    expect("transient bytes", mine.transient_bytes, form.transient_bytes);
    if (form.pairs) expect("pairs", mine.pairs, *form.pairs);
  }
  counters.merge_over(world);
  checks.merge_repeat(counters);
}

void AttentionRun::overwrite(std::byte value) {
  std::set<int> inputs;
  for (const ArrayKind kind : {ArrayKind::q, ArrayKind::kv, ArrayKind::d_out})
    inputs.insert(plan_.arrays[static_cast<size_t>(own(kind))].storage);
  for (const PlanArray& array : plan_.arrays) {
    if (inputs.contains(array.storage)) continue;
    if (!setup_.with_backward && array.kind > ArrayKind::stats) continue;
    const auto bytes = machine_.workspace.storage(
        array.storage, stored_bytes(array, workload_.heads, setup_.types));
    machine_.stream.fill(bytes.data(), value, bytes.size());
  }
}

void AttentionRun::prepare(Pass pass, bool poisoned) {
  if (poisoned) overwrite(std::byte{0xff});  // NaN in every type
  if (pass == Pass::backward) executor_->run(Pass::forward);
}

void AttentionRun::check_traffic(Pass pass, const Traffic& before) {
  const PlanCount planned = count(plan_, pass, workload_.heads, setup_.types);
  const Traffic after = machine_.network.traffic();
  GYRE_CHECK(after.bytes_sent - before.bytes_sent == planned.bytes_sent &&
                 after.messages - before.messages == planned.messages,
             "schedule {} sent {} bytes in {} messages, planned {} in {}", setup_.schedule.name,
             after.bytes_sent - before.bytes_sent, after.messages - before.messages,
             planned.bytes_sent, planned.messages);
}

uint64_t AttentionRun::checksum(Pass pass) {
  std::vector<MatrixRef> results{executor_->matrix(ArrayKind::out)};
  if (pass == Pass::backward)
    results = {executor_->matrix(ArrayKind::d_q), executor_->d_keys(), executor_->d_values()};
  Checksum sum;
  for (const TokenRow& own : token_rows(workload_, shard()))
    for (const MatrixRef& matrix : results)
      sum.add({matrix.data + own.row * matrix.stride * static_cast<int64_t>(size_of(matrix.type)),
               static_cast<size_t>(matrix.cols) * size_of(matrix.type)});
  if (pass == Pass::backward) sum.add(bytes_of(std::span<const double>(executor_->d_sinks())));
  return sum.value();
}

struct AttentionRun::Clocks {
  Clocked compute, communicate;
};

ExecutionTimes AttentionRun::time_whole(Pass pass, Repeats& repeats, Communicator& world,
                                        bool poisoned) {
  ExecutionTimes times;
  prepare(pass, poisoned);
  const Traffic before = machine_.network.traffic();
  HostStream stream;
  world.barrier(stream, "before an iteration")->wait();
  repeats.time([&] { times = executor_->run(pass); });
  // The gradients of sinks are summed by a collective that is no part of the plan.
  if (workload_.sinks.empty()) check_traffic(pass, before);
  return times;
}

void AttentionRun::time_parts(Pass pass, Clocks& clocks, Communicator& world) {
  clocks.compute.time(world, [&] { executor_->run(pass, Execute::compute_only); });
  clocks.communicate.time(world, [&] { executor_->run(pass, Execute::communication_only); });
}

void AttentionRun::warm_up(Pass pass, int iterations, Communicator& world, bool poisoned) {
  if (iterations == 0) return;
  Clocks untimed;
  for (Repeats repeats({iterations}, nullptr); repeats.next();) {
    time_whole(pass, repeats, world, poisoned);
    time_parts(pass, untimed, world);
  }
}

AttentionResult AttentionRun::unmeasured(Pass pass, int cycle) const {
  AttentionResult result;
  result.schedule = setup_.schedule.name;
  result.layout = layout().name;
  result.pass = pass;
  result.tokens = workload_.tokens();
  result.documents = workload_.documents();
  result.cp = layout().cp();
  result.cycle = cycle;
  return result;
}

AttentionResult AttentionRun::measure(Pass pass, const IterationOptions& options,
                                      Communicator& world, const std::function<void()>& after) {
  set_current_step(fmt::format("{}, {}", name(), name_of(pass)));
  const bool poisoned = static_cast<bool>(after);
  Clocks clocks;
  timed_checksums_.clear();
  // The first run of a kind prepares, the second records.
  warm_up(pass, setup_.cuda_graph ? std::max(2, options.warmup) : options.warmup, world, poisoned);
  const bool on_host = machine_.stream.space() == MemorySpace::host;
  std::vector<ExecutionTimes> parts;
  int64_t graph_operations = std::numeric_limits<int64_t>::max();
  const bool computes_here = on_host && !options.only_sleeps;
  Repeats repeats(options.repeats, &world, computes_here);
  while (repeats.next()) {
    if (repeats.last()) {  // its results stay in the arrays
      prepare(pass, false);
      time_parts(pass, clocks, world);
    }
    parts.push_back(time_whole(pass, repeats, world, poisoned));
    graph_operations = std::min(graph_operations, executor_->replayed());
    if (computes_here) timed_checksums_.push_back(checksum(pass));
    if (after) after();
    if (!repeats.last()) time_parts(pass, clocks, world);
  }
  AttentionResult result = unmeasured(pass, 1);
  result.timing = repeats.timing();
  result.communicate_ms = median(slowest_rank(clocks.communicate.gather(world)));
  add_exposure(result, slowest_rank(result.timing.samples_ms),
               slowest_rank(clocks.compute.gather(world)));
  result.flops = attention_flops(pass, workload_.pairs(), workload_.heads.head_dim);
  result.peak = options.peak_flops;
  add_ranks(result, medians(parts), count(plan_, pass, workload_.heads, setup_.types), world);
  result.graph_operations = graph_operations;
  result.graph_windows = executor_->windows();
  result.error_over_tolerance = std::nan("");
  result.check = "-";
  result.finished = utc_now();
  return result;
}

void AttentionRun::add_ranks(AttentionResult& result, const ExecutionTimes& mine,
                             const PlanCount& counted, Communicator& world) const {
  const std::vector<double> kernel = all_gather_value(world, 1e3 * mine.compute),
                            wait = all_gather_value(world, 1e3 * mine.wait),
                            copy = all_gather_value(world, 1e3 * mine.copy);
  const std::vector<int64_t> pairs = all_gather_value(world, counted.pairs),
                             bytes = all_gather_value(world, counted.bytes_sent),
                             messages = all_gather_value(world, counted.messages);
  for (size_t r = 0; r < kernel.size(); ++r) {
    result.ranks.push_back({kernel[r], wait[r], copy[r], pairs[r], bytes[r], messages[r]});
    result.wire_bytes += static_cast<double>(bytes[r]);
  }
  result.transient_bytes = all_reduce_value(world, counted.transient_bytes, ReduceOp::max);
}

void AttentionRun::record(Pass pass, Trace& trace) {
  set_current_step(fmt::format("{}, {}, for the timeline", name(), name_of(pass)));
  prepare(pass, true);
  executor_->set_trace(&trace);
  executor_->run(pass);
  executor_->set_trace(nullptr);
}

void AttentionRun::repeat_checked(Pass pass, Verification& checks) {
  set_current_step(fmt::format("{}, {}, with checked messages", name(), name_of(pass)));
  machine_.check_messages(true);
  prepare(pass, true);
  executor_->run(pass);
  machine_.check_messages(false);
  if (machine_.stream.space() != MemorySpace::host) return;
  Check& same =
      checks.check(fmt::format("{}, {}: bits of timed iterations", name(), name_of(pass)), 0);
  const uint64_t checked = checksum(pass);
  for (size_t i = 0; i < timed_checksums_.size(); ++i) {
    if (timed_checksums_[i] == checked)
      same.add_nothing();
    else
      same.add_failure(fmt::format("rank {}, iteration {}: other bits than with checked messages",
                                   plan_.rank, i));
  }
}

}  // namespace gyre
