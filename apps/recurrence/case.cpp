#include "apps/recurrence/case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "comm/agree.hpp"
#include "core/checksum.hpp"
#include "runtime/clock.hpp"

namespace gyre {

double RecurrenceResult::exposed() const {
  return wire_bytes > 0 ? exposed_ms / time_ms.median : std::nan("");
}

std::vector<std::tuple<std::string, Value, std::string>> RecurrenceResult::further() const {
  return {{"compute_only", compute_ms, "ms"},
          {"communication_only", communicate_ms, "ms"},
          {"exposed_time", exposed_ms, "ms"}};
}

RecurrenceCase::RecurrenceCase(const RecurrenceWorkload& workload,
                               std::unique_ptr<const PlannedRecurrence> planned,
                               const RecurrenceExpectation& expected,
                               const RecurrenceMachine& machine)
    : workload_(workload),
      planned_(std::move(planned)),
      expected_(expected),
      machine_(machine),
      kernel_(make_recurrence_kernel(planned_->plan.computed(planned_->problem.shape),
                                     machine.threads, machine.stream)),
      executor_(planned_->plan, planned_->placed.layout, machine.network, *kernel_) {
  for (int a = 0; a < static_cast<int>(first_result); ++a) {
    if (executor_.data().arrays[a].empty()) continue;
    HostFill fill(executor_.data().arrays[a], machine.stream);
    const MatrixRef& to = fill.matrix();
    std::vector<float> row(to.cols, std::nanf(""));
    const MatrixView<const float> values(row.data(), 1, to.cols);
    for (int64_t r = 0; r < to.rows; ++r) copy_converted(values, to.rows_from(r, 1));  // padding
    for (const Fragment& f : shard().fragments)
      for (int64_t i = 0; i < f.length; ++i) {
        expected_.inputs(static_cast<RecurrenceArray>(a), workload.token_of(f, i), row);
        copy_converted(values, to.rows_from(f.local_begin.value() + i, 1));
      }
    fill.upload();
  }
  if (executor_.convolution() != nullptr) executor_.convolution()->set_weights(expected.weights);
}

std::string RecurrenceCase::name() const {
  return fmt::format("{}, {}, {}, {} tokens", planned_->kind.name, planned_->schedule.name,
                     planned_->placed.layout.name, workload_.tokens());
}

std::string RecurrenceCase::label(Pass pass) const {
  return fmt::format("{}, {}", name(), name_of(pass));
}

RecurrenceResult RecurrenceCase::row(Pass pass, int cycle) const {
  RecurrenceResult row;
  row.kind = planned_->kind.name;
  row.schedule = planned_->schedule.name;
  row.layout = planned_->placed.layout.name;
  row.pass = pass;
  row.tokens = workload_.tokens();
  row.cp = planned_->problem.cp();
  row.key = {{"kind", row.kind},     {"schedule", row.schedule},
             {"layout", row.layout}, {"pass", std::string(name_of(pass))},
             {"tokens", row.tokens}, {"cp", int64_t{row.cp}}};
  row.replayed = machine_.replays;
  if (row.replayed) row.key.emplace_back("replay", true);
  if (cycle > 1) row.key.emplace_back("cycle", int64_t{cycle});
  return row;
}

void RecurrenceCase::check_counts(Verification& checks) const {
  Verification counters;
  Check& check = counters.check(name() + ": counters", 0);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const StateCount mine = count(planned_->plan, pass, planned_->problem.shape);
    const StateForm form =
        closed_form(planned_->schedule, planned_->problem, planned_->plan.rank, pass);
    const auto expect = [&](const char* what, int64_t counted, int64_t wanted) {
      check.add(counted, wanted, [&] {
        return fmt::format("{}, rank {}, {}: {} counted, {} expected", name_of(pass),
                           planned_->plan.rank, what, counted, wanted);
      });
    };
    expect("tokens times heads of all ranks",
           all_reduce_value(machine_.world, mine.tokens, ReduceOp::sum),
           workload_.tokens() * planned_->problem.shape.value_heads);
    expect("bytes received by all ranks",
           all_reduce_value(machine_.world, mine.bytes_received, ReduceOp::sum),
           all_reduce_value(machine_.world, mine.bytes_sent, ReduceOp::sum));
    expect("messages", mine.messages, form.messages);
    expect("bytes sent", mine.bytes_sent, form.bytes_sent);
  }
  counters.merge_over(machine_.world);
  checks.merge_repeat(counters);
}

void RecurrenceCase::prepare(Pass pass, bool poisoned) {
  if (poisoned) executor_.overwrite(std::byte{0xff});  // NaN in every type
  if (pass == Pass::backward) executor_.run(Pass::forward);
}

void RecurrenceCase::run(Pass pass) {
  executor_.run(pass);
}

void RecurrenceCase::start_timing(Pass) {
  compute_ms_.clear();
  communicate_ms_.clear();
}

void RecurrenceCase::run_parts(Pass pass, bool ahead) {
  if (ahead) prepare(pass, false);
  const auto time = [&](RunSteps what, std::vector<double>& to) {
    HostStream host;
    machine_.world.barrier(host, "before an iteration")->wait();
    const Stopwatch watch;
    executor_.run(pass, what);
    to.push_back(1e3 * watch.seconds());
  };
  time(RunSteps::compute_only, compute_ms_);
  time(RunSteps::messages_only, communicate_ms_);
}

SentTraffic RecurrenceCase::sent() const {
  const Traffic traffic = machine_.network.traffic();
  return {traffic.messages, traffic.bytes_sent};
}

std::optional<SentTraffic> RecurrenceCase::expected(Pass pass) const {
  const StateForm form =
      closed_form(planned_->schedule, planned_->problem, planned_->plan.rank, pass);
  return SentTraffic{form.messages, form.bytes_sent};
}

std::optional<uint64_t> RecurrenceCase::checksum(Pass pass) {
  if (machine_.stream.space() != MemorySpace::host) return {};
  Checksum sum;
  const bool backward = pass == Pass::backward;
  for (int a = static_cast<int>(first_result); a < recurrence_arrays; ++a) {
    const MatrixRef& matrix = executor_.data().arrays[a];
    if (matrix.empty() || backward == (static_cast<RecurrenceArray>(a) == RecurrenceArray::out))
      continue;
    for (const Fragment& f : shard().fragments) {
      const MatrixRef rows = matrix.rows_from(f.local_begin.value(), f.length);
      sum.add({rows.data, static_cast<size_t>(rows.rows * rows.cols) * size_of(rows.type)});
    }
  }
  if (backward && executor_.convolution() != nullptr)
    sum.add(std::as_bytes(executor_.convolution()->weight_gradients()));
  return sum.value();
}

void RecurrenceCase::complete_parts(RecurrenceResult& row) const {
  if (row.replayed) {
    row.compute_ms = row.communicate_ms = row.exposed_ms = std::nan("");
    return;
  }
  const auto slowest = [&](const std::vector<double>& mine) {
    return slowest_rank(gather_samples(machine_.world, mine));
  };
  const auto median = [](const std::vector<double>& samples) { return quantile(samples, 0.5); };
  // Exposed communication is the median difference of each iteration and its compute. A temporary
  // slowdown of the machine affects both alike.
  const std::vector<double> compute = slowest(compute_ms_);
  std::vector<double> added = slowest_rank(row.timing.samples_ms);
  for (size_t i = 0; i < added.size(); ++i) added[i] -= compute[i];
  row.compute_ms = median(compute);
  row.communicate_ms = median(slowest(communicate_ms_));
  row.exposed_ms = median(added);
}

void RecurrenceCase::complete(RecurrenceResult& row) const {
  complete_parts(row);
  const RecurrenceShape& shape = planned_->problem.shape;
  const StateCount mine = count(planned_->plan, row.pass, shape);
  row.flops = recurrence_flops(row.pass, workload_.tokens(), shape) +
              convolution_flops(row.pass, workload_.tokens(), shape);
  row.more_flops =
      all_reduce_value(machine_.world, static_cast<int64_t>(mine.more_flops), ReduceOp::sum);
  row.buffer_bytes =
      all_reduce_value(machine_.world, buffer_bytes(planned_->plan, shape), ReduceOp::max);
  const auto most =
      static_cast<double>(all_reduce_value(machine_.world, mine.tokens, ReduceOp::max));
  row.imbalance = most * row.cp / static_cast<double>(workload_.tokens() * shape.value_heads) - 1;
}

}  // namespace gyre
