#include "predict/recurrence_program.hpp"

#include <algorithm>

#include "predict/op_writer.hpp"
#include "recurrence/convolution_stage.hpp"

namespace gyre {
namespace {

using namespace state_step;

/// Compiles the steps of one rank.
class StateWriter : OpWriter {
 public:
  StateWriter(const Programs& programs, const StatePlan& plan, const RecurrenceOnMachine& of)
      : OpWriter(programs, plan.rank, of.schedule),
        plan_(plan),
        shape_(of.shape),
        rate_(of.machine.recurrence.of(of.kind, p_.pass(), of.rates.value_or(plan.type))) {}

  CompiledRank write() {
    const std::vector<StateStep>& steps = plan_.steps(p_.pass());
    for (size_t i = 0; i < steps.size(); ++i) {
      std::visit([&](const auto& s) { walk(s, steps[i]); }, steps[i]);
      if (i + 1 == steps.size() || steps[i + 1].index() != steps[i].index()) call(steps[i]);
      end_step(std::holds_alternative<Wait>(steps[i]));
    }
    return end();
  }

 private:
  void walk(const Exchange& e, const StateStep& /*step*/) {
    Open open = new_exchange(e.id);
    const int others = p_.ranks() - 1;
    for (size_t i = 0; i < e.sends.size(); ++i) {
      const StateMessage& m = e.sends[i];
      const int64_t bytes = bytes_of_message(m, plan_, shape_);
      if (e.all_gather) {
        join(0, p_.ranks(), bytes, open);
      } else if (e.all_reduce) {
        for (int half = 0; half < 2 && others > 0; ++half)
          join(0, p_.ranks(), bytes / (2 * others), open);
      } else if (m.peer == plan_.rank) {
        copy(2 * bytes);
      } else {
        send(m.peer, bytes, static_cast<int>(i), open);
      }
    }
    if (!e.all_gather && !e.all_reduce)
      for (const StateMessage& m : e.recvs)
        if (m.peer != plan_.rank) receive(m.peer, bytes_of_message(m, plan_, shape_), open);
    start(open);
  }
  void walk(const HeadExchange& e, const StateStep& /*step*/) {
    Open open = new_exchange(e.id);
    const int64_t of_token = bytes_of_token(e, plan_, shape_);
    const int64_t own = plan_.rank_tokens[plan_.rank];
    const int64_t all = tokens_of_all(plan_);
    const int64_t of_tokens = of_token * p_.ranks() * own, of_heads = of_token * all;
    copy(2 * (e.home ? of_heads : of_tokens));
    open.unpacked = 2 * (e.home ? of_tokens : of_heads);
    for (int i = 1; i < p_.ranks(); ++i) {
      const int to = (plan_.rank + i) % p_.ranks();
      send(to, of_token * (e.home ? plan_.rank_tokens[to] : own), i, open);
    }
    for (int i = 1; i < p_.ranks(); ++i) {
      const int from = (plan_.rank + p_.ranks() - i) % p_.ranks();
      receive(from, of_token * (e.home ? own : plan_.rank_tokens[from]), open);
    }
    start(open);
  }
  void walk(const Wait& w, const StateStep& /*step*/) { copy(wait(w.id).unpacked); }
  void walk(const Convolve& c, const StateStep& /*step*/) {
    elementwise(c.parts, own() + sizeof(float));
  }
  void walk(const ConvolveSlopes&, const StateStep& /*step*/) {
    std::vector<int> all(plan_.parts.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
    elementwise(all, own() + 2 * sizeof(float));
  }
  void walk(const ConvolveBack& c, const StateStep& /*step*/) {
    elementwise(c.parts, own() + sizeof(float));
  }
  template <class Other>
  void walk(const Other& /*other*/, const StateStep& step) {
    const ChunkedWork work = chunked_work(step, plan_, p_.pass(), shape_);
    call_.flops += work.flops;
    call_.scanned = std::max(call_.scanned, work.scanned);
  }
  /// Adds one kernel call for all parts of the consecutive steps since the last call.
  void call(const StateStep& last) {
    compute(rate_.seconds(call_, std::holds_alternative<Summarize>(last) ||
                                     std::holds_alternative<SummarizeBack>(last)));
    call_ = {};
  }

  int64_t own() const { return static_cast<int64_t>(size_of(plan_.type)); }
  /// Reads and writes so many bytes of each channel of the convolution.
  void elementwise(const std::vector<int>& parts, size_t bytes) {
    int64_t tokens = 0;
    for (const int part : parts) tokens += plan_.parts[part].tokens;
    const auto moved =
        static_cast<double>(tokens * shape_.channels() * static_cast<int64_t>(bytes));
    spend(SpanKind::pass, moved / machine().decoder.elementwise_bytes_per_s);
  }

  const StatePlan& plan_;
  const RecurrenceShape& shape_;
  const RecurrenceRate& rate_;
  ChunkedWork call_;
};

}  // namespace

std::vector<RankTimes> times_of(const std::vector<StatePlan>& plans, Pass pass,
                                const RecurrenceOnMachine& recurrence) {
  Programs programs(pass, recurrence.machine, static_cast<int>(plans.size()), recurrence.place);
  for (const StatePlan& plan : plans) programs.add(StateWriter(programs, plan, recurrence).write());
  return run_programs(programs, recurrence.machine, recurrence.schedule);
}

std::vector<PassPrediction> predict(const PredictedRecurrence& predicted,
                                    const std::vector<Pass>& passes, const MachineModel& machine) {
  check_machine(machine);
  const RecurrenceProblem& problem = predicted.problem;
  const RecurrenceOnMachine recurrence{problem.shape, predicted.kind,  predicted.schedule.name,
                                       machine,       predicted.place, predicted.rates};
  std::vector<PassPrediction> results(passes.size());
  std::vector<Programs> programs;
  for (const Pass pass : passes)
    programs.emplace_back(pass, machine, problem.cp(), predicted.place);
  for (int rank = 0; rank < problem.cp(); ++rank) {
    const StatePlan plan = plan_rank(predicted.schedule, problem, rank);
    for (size_t i = 0; i < passes.size(); ++i) {
      programs[i].add(StateWriter(programs[i], plan, recurrence).write());
      const StateCount counted = count(plan, passes[i], problem.shape);
      PassPrediction& result = results[i];
      result.pass = passes[i];
      result.pairs += counted.tokens;
      result.messages_most = std::max(result.messages_most, counted.messages);
      result.bytes_most = std::max(result.bytes_most, counted.bytes_sent);
      result.transient_bytes = std::max(result.transient_bytes, transient_bytes(plan, problem));
    }
  }
  for (size_t i = 0; i < passes.size(); ++i)
    add_times(results[i], programs[i], machine, predicted.schedule.name);
  return results;
}

}  // namespace gyre
