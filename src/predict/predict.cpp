#include "predict/predict.hpp"

#include <omp.h>

#include <algorithm>

#include "attention/schedules/registry.hpp"
#include "core/error.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

/// Accumulates one direction from plans that arrive one rank at a time.
class PassReader {
 public:
  PassReader(Pass pass, const PredictedProblem& predicted, const MachineModel& machine)
      : predicted_(predicted),
        programs_(pass, predicted.problem.heads, predicted.types, machine, predicted.problem.cp(),
                  predicted.place) {
    result_.pass = pass;
  }

  /// Results for one rank. Several threads may call read() at once.
  struct Rank {
    CompiledRank compiled;
    PlanCount counted;
  };
  Rank read(const RankPlan& plan) const {
    return {programs_.compile(plan, predicted_.schedule.name),
            count(plan, result_.pass, predicted_.problem.heads, predicted_.types)};
  }
  /// Adds the next rank, in order.
  void add(const Rank& rank) {
    programs_.add(rank.compiled);
    const PlanCount& counted = rank.counted;
    result_.pairs += counted.pairs;
    result_.messages_most = std::max(result_.messages_most, counted.messages);
    result_.bytes_most = std::max(result_.bytes_most, counted.bytes_sent);
    result_.transient_bytes = std::max(result_.transient_bytes, counted.transient_bytes);
  }

  PassPrediction finish(const MachineModel& machine) {
    add_times(result_, programs_, machine, predicted_.schedule.name);
    return result_;
  }

 private:
  const PredictedProblem& predicted_;
  Programs programs_;
  PassPrediction result_;
};

/// Reads the plans of all ranks, in order. OpenMP threads make and read a few plans at a time, then
/// drop them.
void read_plans(const PredictedProblem& predicted, std::vector<PassReader>& passes) {
  const int threads = wanted_threads(), at_once = 8 * threads;
  for (int first = 0; first < predicted.problem.cp(); first += at_once) {
    const int count = std::min(at_once, predicted.problem.cp() - first);
    std::vector<std::vector<PassReader::Rank>> ranks(count);
    for_each_task(threads, count, [&](int64_t i, int /*thread*/) {
      const RankPlan plan = predicted.schedule.plan(predicted.problem, first + static_cast<int>(i));
      for (const PassReader& pass : passes) ranks[i].push_back(pass.read(plan));
    });
    for (const std::vector<PassReader::Rank>& rank : ranks)
      for (size_t pass = 0; pass < passes.size(); ++pass) passes[pass].add(rank[pass]);
  }
}

}  // namespace

double PassPrediction::exposed() const {
  const double more = seconds - compute_only;
  return more > 1e-9 * seconds ? more : 0;
}

PassPrediction::Bound PassPrediction::bound() const {
  const double imbalance = kernel_most - kernel_mean;
  const double network = exposed() - copies_most;
  const double most = std::max({imbalance, network, copies_most});
  // The kernel is the bound if at most a tenth of the time is lost to everything else.
  if (kernel_mean >= 0.9 * seconds || most <= 0) return Bound::kernel;
  if (most == imbalance) return Bound::imbalance;
  return most == network ? Bound::network : Bound::copies;
}

const char* name_of(PassPrediction::Bound bound) {
  switch (bound) {
    case PassPrediction::Bound::kernel:
      return "kernel";
    case PassPrediction::Bound::imbalance:
      return "imbalance";
    case PassPrediction::Bound::network:
      return "network";
    case PassPrediction::Bound::copies:
      break;
  }
  return "copies";
}

void add_times(PassPrediction& result, const Programs& programs, const MachineModel& machine,
               const std::string& schedule) {
  const std::vector<RankTimes> times = run_programs(programs, machine, schedule);
  result.seconds = makespan_of(times);
  result.compute_only = compute_only_of(times);
  result.bytes_by_tier.resize(std::max<size_t>(1, machine.links.size()));
  double kernel = 0, extrapolated = 0;
  for (int r = 0; r < programs.ranks(); ++r) {
    const ProgramCost& cost = programs.cost(r);
    kernel += cost.kernel;
    extrapolated += cost.extrapolated;
    result.kernel_most = std::max(result.kernel_most, cost.kernel);
    result.copies_most = std::max(result.copies_most, times[r].copy);
    result.algorithms.insert(cost.algorithms.begin(), cost.algorithms.end());
    for (size_t tier = 0; tier < result.bytes_by_tier.size(); ++tier)
      result.bytes_by_tier[tier] += cost.bytes_sent.at(tier);
  }
  result.kernel_mean = kernel / programs.ranks();
  result.extrapolated = kernel > 0 ? extrapolated / kernel : 0;
}

int wanted_threads() {
  return std::min(omp_get_max_threads(), omp_get_num_procs());
}

std::vector<PassPrediction> predict(const PredictedProblem& predicted,
                                    const MachineModel& machine) {
  check_machine(machine);
  const std::string refusal = predicted.schedule.why_not(predicted.problem);
  if (!refusal.empty()) throw_usage("schedule {}: {}", predicted.schedule.name, refusal);
  std::vector<PassReader> passes;
  passes.emplace_back(Pass::forward, predicted, machine);
  if (predicted.problem.passes == PlanPasses::both)
    passes.emplace_back(Pass::backward, predicted, machine);
  read_plans(predicted, passes);
  std::vector<PassPrediction> predictions(passes.size());
  for_each_task(wanted_threads(), std::ssize(passes), [&](int64_t pass, int /*thread*/) {
    predictions[pass] = passes[pass].finish(machine);
  });
  return predictions;
}

}  // namespace gyre
