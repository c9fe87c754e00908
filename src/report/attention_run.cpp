#include "report/attention_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "attention/closed_forms.hpp"
#include "comm/agree.hpp"
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

}  // namespace

double AttentionRow::share_of_peak() const {
  return peak > 0 ? tflops_per_rank() * 1e12 / peak : std::nan("");
}

double AttentionRow::exposed() const {
  return std::max(0.0, 1 - compute_ms / time_ms.median);
}

double AttentionRow::overlap() const {
  if (wire_bytes == 0) return std::nan("");
  const double added = std::max(0.0, time_ms.median - compute_ms);
  return std::clamp(1 - added / communicate_ms, 0.0, 1.0);
}

AttentionRun::AttentionRun(const AttentionCase& problem, const TensorRows& inputs,
                           const Schedule& schedule, const ScheduleOptions& schedule_options,
                           const LayoutKind& layout, const LayoutOptions& layout_options,
                           const ElementTypes& types, bool with_backward, BlockKernel& kernel,
                           Communicator& network, AttentionWorkspace& workspace)
    : problem_(problem),
      placed_(problem, layout, layout_options),
      planned_{&placed_.layout, problem.heads, problem.mask, schedule_options},
      schedule_(schedule),
      types_(types),
      plan_(plan_rank(schedule, planned_, network.rank())),
      network_(network),
      executor_(plan_, problem.heads, types, network, kernel, stream_, workspace, with_backward) {
  executor_.set_sinks(problem.sinks);
  fill_rows(problem, inputs, InputTensor::q, shard(), executor_.matrix(ArrayKind::q));
  fill_rows(problem, inputs, InputTensor::k, shard(), executor_.keys());
  fill_rows(problem, inputs, InputTensor::v, shard(), executor_.values());
  if (with_backward)
    fill_rows(problem, inputs, InputTensor::d_out, shard(), executor_.matrix(ArrayKind::d_out));
}

std::string AttentionRun::name() const {
  return fmt::format("{}, {}, {} tokens", schedule_.name, layout().name, problem_.tokens());
}

AttentionTolerances AttentionRun::tolerances() const {
  return attention_tolerances(attention_reductions(plan_, planned_, network_), types_);
}

void AttentionRun::check_counts(Verification& checks, Communicator& world) const {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const PlanCount mine = count(plan_, pass, problem_.heads, types_);
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
    if (const auto form = closed_form(schedule_.name, planned_, types_, plan_.rank, pass)) {
      expect("messages", mine.messages, form->messages);
      expect("bytes sent", mine.bytes_sent, form->bytes_sent);
      expect("bytes received", mine.bytes_received, form->bytes_received);
      expect("transient bytes", mine.transient_bytes, form->transient_bytes);
      if (form->pairs) expect("pairs", mine.pairs, *form->pairs);
    }
    counters.merge_over(world);
    checks.merge(counters);
  }
}

void AttentionRun::prepare(Pass pass) {
  if (pass == Pass::backward) executor_.run(Pass::forward);
}

void AttentionRun::check_traffic(Pass pass, const Traffic& before) {
  const PlanCount planned = count(plan_, pass, problem_.heads, types_);
  const Traffic& after = network_.traffic();
  GYRE_CHECK(after.bytes_sent - before.bytes_sent == planned.bytes_sent &&
                 after.messages - before.messages == planned.messages,
             "schedule {} sent {} bytes in {} messages, planned {} in {}", schedule_.name,
             after.bytes_sent - before.bytes_sent, after.messages - before.messages,
             planned.bytes_sent, planned.messages);
}

AttentionRow AttentionRun::measure(Pass pass, const MeasureOptions& options, Communicator& world,
                                   const std::function<void()>& after) {
  set_current_step(fmt::format("{}, {}", name(), name_of(pass)));
  Clocked whole, compute, communicate;
  double kernel_seconds = 0;
  for (int i = -options.warmup; i < options.iterations; ++i) {
    Clocked untimed;
    prepare(pass);
    const Traffic before = network_.traffic();
    (i < 0 ? untimed : whole).time(world, [&] { kernel_seconds = executor_.run(pass).compute; });
    if (problem_.sinks.empty()) check_traffic(pass, before);
    if (i >= 0 && after) after();
    (i < 0 ? untimed : compute).time(world, [&] { executor_.run(pass, Execute::compute_only); });
    (i < 0 ? untimed : communicate).time(world, [&] {
      executor_.run(pass, Execute::communication_only);
    });
  }
  AttentionRow row;
  row.schedule = schedule_.name;
  row.layout = layout().name;
  row.pass = pass;
  row.tokens = problem_.tokens();
  row.documents = problem_.documents();
  row.cp = layout().cp();
  row.samples_ms = whole.gather(world);
  row.time_ms = summarize(slowest_rank(row.samples_ms));
  row.compute_ms = median(slowest_rank(compute.gather(world)));
  row.communicate_ms = median(slowest_rank(communicate.gather(world)));
  row.flops = attention_flops(pass, problem_.pairs(), problem_.heads.head_dim);
  const PlanCount counted = count(plan_, pass, problem_.heads, types_);
  row.wire_bytes = static_cast<double>(all_reduce_value(world, counted.bytes_sent, ReduceOp::sum));
  row.busiest_bytes =
      static_cast<double>(all_reduce_value(world, counted.bytes_sent, ReduceOp::max));
  row.messages = all_reduce_value(world, counted.messages, ReduceOp::max);
  row.transient_bytes = all_reduce_value(world, counted.transient_bytes, ReduceOp::max);
  row.imbalance = imbalance(all_gather_value(world, kernel_seconds));
  row.peak = options.peak_flops;
  row.error_over_tolerance = std::nan("");
  row.check = "-";
  return row;
}

void AttentionRun::repeat(Pass pass, Trace* trace) {
  prepare(pass);
  executor_.set_trace(trace);
  executor_.run(pass);
  executor_.set_trace(nullptr);
}

}  // namespace gyre
