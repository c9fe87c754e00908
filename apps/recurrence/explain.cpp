// --explain of gyre-recurrence (report.hpp): what plans do and cost, without running them.

#include "predict/explain.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "apps/recurrence/report.hpp"
#include "comm/agree.hpp"
#include "predict/recurrence_program.hpp"
#include "report/table.hpp"

namespace gyre {
namespace {

using namespace state_step;

/// " from rank 0, 2", or nothing.
std::string peers_text(const char* word, const std::vector<StateMessage>& messages) {
  std::vector<int> peers;
  for (const StateMessage& m : messages) peers.push_back(m.peer);
  return peers.empty() ? "" : fmt::format("{} {}", word, fmt::join(peers, ", "));
}

/// " 3 parts: 0, 1, 2"
std::string parts_text(const std::vector<int>& parts) {
  return fmt::format(" {} parts{}{}", parts.size(), parts.empty() ? "" : ": ",
                     fmt::join(parts, ", "));
}

/// "maps of part 0", "all-gather of maps of states"
struct StepText {
  const StatePlan& plan;
  std::string operator()(const Summarize& s) const {
    if (s.part < 0) return "identity: no document continues on the next rank";
    return fmt::format("{} of part {}", s.begins ? "state B" : "map M, B", s.part);
  }
  std::string operator()(const SummarizeBack& s) const {
    if (s.part < 0) return "no gradient: no document continues from another rank";
    return fmt::format("gradient C of part {}", s.part);
  }
  std::string operator()(const Exchange& s) const {
    if (s.all_gather) return fmt::format("post an all-gather of {}", s.what);
    if (s.all_reduce) return fmt::format("post an all-reduce of the {}", s.what);
    return fmt::format("post {}{}{}", s.what, peers_text(" from rank", s.recvs),
                       peers_text(" to rank", s.sends));
  }
  std::string operator()(const Convolve& s) const { return "convolve" + parts_text(s.parts); }
  std::string operator()(const ConvolveSlopes&) const {
    return "gradients of the convolution's sums, weights and histories";
  }
  std::string operator()(const ConvolveBack& s) const {
    return "gradients of what was convolved," + parts_text(s.parts);
  }
  std::string operator()(const Wait&) const { return "wait"; }
  std::string operator()(const Compose& s) const {
    const auto maps = std::ssize(s.terms) - (s.start < 0 ? 1 : 0);
    return fmt::format("compose {} maps", maps);
  }
  std::string operator()(const Join&) const { return "join the maps of two runs"; }
  std::string operator()(const HeadExchange& s) const {
    std::string text;
    for (const RecurrenceArray array : s.arrays)
      text += (text.empty() ? "" : ", ") + std::string(name_of(array));
    return fmt::format("post an all-to-all of {}, {}", text,
                       s.home ? "heads for tokens" : "tokens for heads");
  }
  std::string operator()(const Run& s) const {
    const bool from_state = s.before >= 0, to_gradient = s.d_behind >= 0;
    return fmt::format("run part {}, {} tokens{}{}", s.part, plan.parts[s.part].tokens,
                       from_state ? ", from a state" : "", to_gradient ? ", from a gradient" : "");
  }
};

/// A pass of the plans of all ranks.
struct ExplainedPass {
  std::string kind, schedule, layout;
  Pass pass;
  double seconds = 0, waited = 0;  ///< of the slowest rank; the most that one waits
  int64_t tokens_most = 0, messages = 0, sent = 0, buffers = 0;  ///< the most of a rank
  int64_t tokens = 0, sent_by_all = 0;
  double flops = 0, more_flops = 0;  ///< of all ranks
};

const Table<ExplainedPass>& explained_table() {
  using Row = ExplainedPass;
  static const Table<Row> table({
      {"kind", "", 5, 0, &Row::kind, Align::left},
      {"schedule", "", 13, 0, &Row::schedule, Align::left},
      {"layout", "", 15, 0, &Row::layout, Align::left},
      {"pass", "", 4, 0, [](const Row& r) { return std::string(name_of(r.pass)); }, Align::left},
      {"time", "ms", 10, 4, [](const Row& r) { return 1e3 * r.seconds; }},
      {"waits", "ms", 10, 4, [](const Row& r) { return 1e3 * r.waited; }},
      {"extra", "%", 6, 1, [](const Row& r) { return 100 * r.more_flops / r.flops; }},
      {"msgs", "", 5, 0, &Row::messages},
      {"sent", "MB/rank", 9, 3, [](const Row& r) { return r.sent / 1e6; }},
      {"all sent", "MB", 9, 3, [](const Row& r) { return r.sent_by_all / 1e6; }},
      {"buffers", "MB/rank", 8, 2, [](const Row& r) { return r.buffers / 1e6; }},
  });
  return table;
}

ExplainedPass explained(const std::vector<StatePlan>& plans, const RecurrenceShape& shape,
                        Pass pass, const std::vector<RankTimes>& times) {
  ExplainedPass row;
  row.pass = pass;
  for (const StatePlan& plan : plans) {
    const StateCount counted = count(plan, pass, shape);
    row.messages = std::max(row.messages, counted.messages);
    row.sent = std::max(row.sent, counted.bytes_sent);
    row.buffers = std::max(row.buffers, buffer_bytes(plan, shape));
    row.sent_by_all += counted.bytes_sent;
    row.flops += counted.flops;
    row.more_flops += counted.more_flops;
  }
  row.seconds = makespan_of(times);
  for (const RankTimes& rank : times) row.waited = std::max(row.waited, rank.wait);
  return row;
}

/// The steps of up to 16 ranks, with the end of each rank.
std::string steps_text(const std::vector<StatePlan>& plans, Pass pass,
                       const std::vector<RankTimes>& times) {
  std::string text;
  for (const int rank : shown_ranks(static_cast<int>(plans.size()), 16)) {
    const StatePlan& plan = plans[rank];
    text += fmt::format("# {} rank {}: done after {:.4f} ms, of which it waits {:.4f} ms\n",
                        name_of(pass), rank, 1e3 * times[rank].total, 1e3 * times[rank].wait);
    for (const StateStep& step : plan.steps(pass))
      text += fmt::format("#   {}\n", std::visit(StepText{plan}, step));
  }
  return text;
}

std::string explanation_of(const RecurrenceWorkload& workload, const RecurrenceOptions& o,
                           const RecurrenceFile* file) {
  std::string text =
      fmt::format("# cp = {}, {}\n{}", o.cp, workload.origin, explained_table().header());
  std::string steps, refused;
  const MachineModel machine = o.machine();
  bool any = false;
  for_each_choice(
      o, [&](const RecurrenceKind& kind, const StateSchedule& schedule, const LayoutKind& layout) {
        const RecurrenceShape shape = file == nullptr ? shape_of(o, kind) : shape_of(*file);
        const PaddedLayout placed(workload.offsets, layout, o.layout.for_ranks(o.cp));
        const RecurrenceProblem problem{&placed.layout, shape, o.type()};
        if (const std::string reason = schedule.why_not(problem); !reason.empty()) {
          refused += fmt::format("# refused: schedule {}: {}\n", schedule.name, reason);
          return;
        }
        std::vector<StatePlan> plans;
        for (int r = 0; r < o.cp; ++r) plans.push_back(plan_rank(schedule, problem, r));
        for (const Pass pass : o.passes()) {
          const std::vector<RankTimes> times =
              times_of(plans, pass, {shape, kind.name, schedule.name, machine});
          ExplainedPass row = explained(plans, shape, pass, times);
          row.kind = kind.name;
          row.schedule = schedule.name;
          row.layout = layout.name;
          text += explained_table().row(row);
          if (!o.has_many()) steps += steps_text(plans, pass, times);
        }
        any = true;
      });
  if (!any) throw_usage("nothing can be explained:\n{}", refused);
  return text + steps + refused +
         fmt::format(
             "# times are of a model: a rank computes {} TFLOP/s, with the FLOPs of chunks, and "
             "sends "
             "{} GB/s, latency {} us\n",
             o.tflops, o.gbytes_per_s, o.latency_us);
}

}  // namespace

ExitCode explain(RecurrenceOptions& o, AppContext& context) {
  run_agreed(context.world, "options", [&] { refuse_report_options(context, "--explain"); });
  std::optional<RecurrenceFile> file;
  if (!o.input.empty()) file = read_recurrence_file(context.world, o.input);
  std::string text;
  run_on_root(context.world, "explanation", [&] {
    if (file) o.kind = kind_of(*file).name;
    const RecurrenceWorkload workload =
        file ? workload_of(*file, o) : generated_workload(o, o.sweep.sizes().front());
    text = explanation_of(workload, o, file ? &*file : nullptr);
  });
  context.outputs.publish(text);
  return ExitCode::ok;
}

}  // namespace gyre
