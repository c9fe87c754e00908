#include "apps/logprobs/run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "apps/logprobs/registry.hpp"
#include "comm/agree.hpp"
#include "core/index.hpp"
#include "core/special_values.hpp"
#include "report/result.hpp"
#include "report/value.hpp"
#include "runtime/clock.hpp"
#include "runtime/peak.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

SentTraffic operator-(const SentTraffic& a, const SentTraffic& b) {
  return {a.messages - b.messages, a.bytes - b.bytes};
}

/// What this rank has sent so far inside the groups of the grids.
SentTraffic sent_so_far(LogprobsBackend& backend) {
  SentTraffic sent;
  const auto add = [&](ProcessGrid& grid) {
    for (const Communicator* group : {&grid.tp(), &grid.cp()}) {
      sent.messages += group->traffic().messages;
      sent.bytes += group->traffic().bytes_sent;
    }
  };
  add(backend.grid());
  if (&backend.arrays() != &backend.grid()) add(backend.arrays());
  return sent;
}

/// One operation in one direction.
class Measurement {
 public:
  Measurement(LogprobsOp& op, Pass pass, LogprobsContext& context, std::string label,
              Verification& checks)
      : op_(op), pass_(pass), c_(context), label_(std::move(label)), checks_(checks) {}

  /// Times all iterations. What the last one left, or each of them, is verified; then what a call
  /// leaves whose messages are checked. On CPUs all that was verified must have the bits of that
  /// call. (On GPUs messages are not checked.)
  Timing time() {
    const LogprobsOptions& o = c_.options;
    const bool on_host = c_.backend.space() == MemorySpace::host;
    c_.backend.check_messages(false);
    Repeats untimed({o.warmup}, nullptr);
    while (o.warmup > 0 && untimed.next()) once(untimed, untimed.index() == 0, false);
    Repeats repeats(o.repeats, &c_.grid.world(), on_host);
    while (repeats.next()) {
      const bool verified = o.check == "all" || (o.check == "last" && repeats.last());
      c_.backend.check_messages(false);
      once(repeats, o.warmup == 0 && repeats.index() == 0, verified);
      c_.backend.check_messages(true);  // those of verification, too
      if (verified) verify();
    }
    Timing timing = repeats.timing();
    if (o.check == "none") return timing;
    Repeats checked({1}, nullptr);
    checked.next();
    once(checked, true, true);
    verify();
    if (on_host) compare_bits();
    return timing;
  }
  const SentTraffic& sent() const { return sent_; }

 private:
  void prepare(bool first, bool poisoned) {
    if (poisoned) op_.poison();
    op_.restore();
    if (pass_ == Pass::forward) return;
    if (first || poisoned) op_.run(Pass::forward);
    op_.prepare_backward();
  }
  /// From a barrier, behind which nothing is left to do, until all that was submitted is done.
  void once(Repeats& repeats, bool first, bool poisoned) {
    prepare(first, poisoned);
    Stream& stream = c_.backend.stream();
    stream.synchronize();
    c_.grid.world().barrier(stream, "before a call")->wait();
    const SentTraffic before = sent_so_far(c_.backend);
    repeats.time([&] {
      op_.run(pass_);
      stream.synchronize();
    });
    const SentTraffic now = sent_so_far(c_.backend) - before;
    if (c_.options.check != "none") count(now);
    sent_ = now;
  }
  /// Messages and bytes against the closed form.
  void count(const SentTraffic& now) {
    const std::optional<SentTraffic> expected = op_.expected(pass_);
    if (!expected) return;
    Check& check = checks_.check(label_ + ": counters", 0);
    const auto add = [&](const char* what, int64_t counted, int64_t wanted) {
      check.add(static_cast<double>(counted), static_cast<double>(wanted), [&] {
        return fmt::format("rank {}, {}: {} counted, {} expected", c_.grid.world().rank(), what,
                           counted, wanted);
      });
    };
    add("messages", now.messages, expected->messages);
    add("bytes sent", now.bytes, expected->bytes);
  }
  void verify() {
    Verification checks(c_.options.tol_scale);
    op_.verify(pass_, label_, checks);
    std::vector<uint64_t> digests;
    for (const Check& check : checks.checks()) digests.push_back(check.digest());
    verified_.push_back(std::move(digests));
    checks_.merge_repeat(checks);
  }
  void compare_bits() {
    Check& same = checks_.check(label_ + ": bits of timed calls", 0);
    for (size_t i = 0; i + 1 < verified_.size(); ++i) {
      if (verified_[i] == verified_.back())
        same.add_nothing();
      else
        same.add_failure(fmt::format("rank {}, call {}: other bits than with checked messages",
                                     c_.grid.world().rank(), i));
    }
  }

  LogprobsOp& op_;
  Pass pass_;
  LogprobsContext& c_;
  std::string label_;
  Verification& checks_;
  SentTraffic sent_;
  std::vector<std::vector<uint64_t>> verified_;  // digests of the checks of each verified call
};

/// What this machine can do at most of what a pass does; of a GPU fills and copies alone are known.
double limit_of(RowTraffic traffic, const MachineRates& rates, bool in_place) {
  const double update = in_place && rates.update > 0 ? rates.update : rates.copy;
  switch (traffic) {
    case RowTraffic::reads:
      return rates.read > 0 ? rates.read : rates.copy;
    case RowTraffic::updates:
      return update;
    case RowTraffic::copies:
      return rates.copy;
    case RowTraffic::writes:
      return rates.fill > 0 ? rates.fill : update;
    case RowTraffic::products:
      return rates.flops;
  }
  return 0;
}

int64_t largest(Communicator& world, int64_t mine) {
  return all_reduce_value(world, mine, ReduceOp::max);
}

/// The largest of all ranks; NaN if it is one here, and with it everywhere.
double largest(Communicator& world, double mine) {
  return std::isnan(mine) ? mine : all_reduce_value(world, mine, ReduceOp::max);
}

LogprobsResult measure(LogprobsOp& op, Pass pass, RowTraffic traffic, LogprobsResult row,
                       LogprobsContext& context, int64_t memory_before, const MachineRates& rates,
                       Verification& all_checks) {
  const LogprobsOptions& o = context.options;
  Communicator& world = context.grid.world();
  Verification checks(o.tol_scale);
  row.pass = pass;
  const std::string label =
      fmt::format("{}, {}, {}, {} tokens", row.op, row.method, name_of(pass), row.tokens);
  set_current_step(label);
  reset_memory_peak();
  Measurement measurement(op, pass, context, label, checks);
  row.timing = measurement.time();
  row.finished = utc_now();
  row.extra_bytes = largest(world, std::max<int64_t>(0, memory_use().peak_bytes - memory_before));
  row.time_ms = row.timing.statistics();
  row.ideal_bytes = largest(world, op.ideal_bytes(pass));
  row.flops = largest(world, op.flops(pass));
  row.limit = limit_of(traffic, rates, o.in_place);
  const SentTraffic sent = measurement.sent();
  row.messages = largest(world, sent.messages);
  row.bytes_sent = largest(world, sent.bytes);
  row.wire_bytes = static_cast<double>(all_reduce_value(world, sent.bytes, ReduceOp::sum));
  row.note = op.note();
  row.check = "-";
  row.error_over_tolerance = nan_of<double>;
  if (o.check == "none") return row;
  checks.merge_over(world);
  row.check = !checks.passed() ? "FAILED" : row.tokens > 0 ? "ok" : "-";
  row.error_over_tolerance = checks.max_error_over_tolerance();
  all_checks.merge_repeat(checks);
  return row;
}

/// What the operation reads and the file does not have; empty: nothing.
std::string missing_input(const InputNeeds& needs, const LogprobsWorkload& problem) {
  if (needs.ids && problem.picks == 0) return problem.origin + " has no /logprobs/ids";
  if (needs.hidden && !problem.has_hidden) return problem.origin + " has no /logprobs/hidden";
  if (needs.teacher && !problem.has_teacher) return problem.origin + " has no /logprobs/teacher";
  if (needs.teacher_values && !problem.has_teacher_values)
    return problem.origin + " has neither /logprobs/teacher nor /logprobs/teacher_values";
  return "";
}

}  // namespace

double LogprobsResult::share_of_limit() const {
  if (!(limit > 0)) return nan_of<double>;
  const double amount = std::isnan(flops) ? ideal_bytes : flops;
  return amount / (1e-3 * time_ms.median) / limit;
}

void for_each_run(const LogprobsOptions& o,
                  const std::function<void(const LogprobsOperation&, bool upstream)>& body) {
  for (const LogprobsOperation& operation : logprobs_operations()) {
    if (!o.wants(operation.name) || (o.pass == "bwd" && !operation.has_backward())) continue;
    if (o.wants_method("gyre")) body(operation, false);
    if (o.wants_method("upstream") && operation.upstream) body(operation, true);
  }
}

int64_t rows_of_a_size(const LogprobsOptions& o) {
  int64_t rows = 0;
  for_each_run(o, [&](const LogprobsOperation& operation, bool) {
    rows += operation.has_backward() && o.pass == "both" ? 2 : 1;
  });
  return rows;
}

int64_t planned_bytes(const LogprobsOperation& operation, bool upstream,
                      const LogprobsWorkload& problem, const LogprobsOptions& o, int rank) {
  const MemoryCase run{problem, o, upstream, rank % o.tp};
  const auto picks = static_cast<double>(std::max(problem.picks, problem.top));
  // A few arrays of a number or of `picks` a token, and their copies from all ranks.
  const double small = run.tokens() * (40 + 24 * picks + 8 * o.tp * (1 + picks));
  if (operation.bytes_without_logits) return saturated(small + operation.bytes_without_logits(run));
  const MatrixNeeds& needs = operation.matrices;
  const bool differentiates = operation.has_backward() && o.pass != "fwd";
  const double backward = differentiates ? needs.backward : 0;
  double element = run.element_bytes() * (1 + needs.always + backward);
  element += static_cast<double>(size_of(problem.output_type)) *
             (needs.output + (differentiates ? needs.d_output : 0));
  if (upstream) element += 4 * needs.upstream;
  if (!o.output.empty() && backward > 0) element += 4;  // the gradient, kept for the file
  return saturated(small + run.tokens() * run.columns() * element);
}

std::string why_not(const LogprobsOperation& operation, bool upstream,
                    const LogprobsWorkload& problem, const LogprobsOptions& o, int64_t memory_bytes,
                    int rank) {
  if (std::string reason = missing_input(operation.needs, problem); !reason.empty()) return reason;
  if (std::string reason = operation.why_not(problem, o, upstream); !reason.empty()) return reason;
  const int64_t bytes = planned_bytes(operation, upstream, problem, o, rank);
  if (memory_bytes == 0 || bytes <= memory_bytes) return "";
  const double share = static_cast<double>(memory_bytes) / static_cast<double>(bytes);
  const double fit = std::floor(share * static_cast<double>(problem.tokens()));
  return fmt::format("needs {} a rank, and {} are available; {}",
                     si_text(static_cast<double>(bytes), "B"),
                     si_text(static_cast<double>(memory_bytes), "B"),
                     fit > 0 ? fmt::format("about {:.0f} tokens fit", fit)
                             : std::string("not even one token fits: take more ranks"));
}

void run_operation(const LogprobsOperation& operation, bool upstream, LogprobsContext& context,
                   const MachineRates& rates, const RowSink& rows,
                   std::vector<LogprobsPart>* output, Verification& checks) {
  const LogprobsOptions& o = context.options;
  LogprobsResult row;
  row.op = operation.name;
  row.method = upstream ? "upstream" : "gyre";
  row.tokens = context.problem.tokens();
  row.vocab = context.problem.vocab.vocab_size;
  row.tp = o.tp, row.cp = o.cp;
  row.cycle = rows.cycle;
  std::vector<Pass> passes;
  for (const Pass pass : o.passes()) {
    row.pass = pass;
    if ((pass == Pass::forward || operation.has_backward()) && rows.wanted(row))
      passes.push_back(pass);
  }
  if (passes.empty()) return;
  set_current_step(fmt::format("{}, {}: making inputs", row.op, row.method));
  const std::unique_ptr<LogprobsOp> op = operation.make(context, upstream);
  if (operation.has_backward() && o.pass != "fwd") op->prepare_backward();
  const int64_t memory_before = memory_use().current_bytes;
  op->start();
  for (const Pass pass : passes) {
    rows.add(
        measure(*op, pass, operation.traffic(pass), row, context, memory_before, rates, checks));
    if (output != nullptr && !upstream) op->collect(pass, *output);
  }
}

}  // namespace gyre
