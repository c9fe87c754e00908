#include "predict/scoring.hpp"

#include <algorithm>
#include <map>
#include <tuple>

#include "model/decoder_steps.hpp"
#include "predict/predict.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

/// Cost of a bin over all layers.
struct BinCost {
  DecoderTimes times;
  double kernel = 0, extrapolated = 0;  ///< seconds, over all ranks
  double bytes_sent = 0;
  int64_t pairs = 0;
  int64_t memory = 0;  ///< bytes of a rank
};

/// Adds up the costs of one bin's steps on one rank.
class StepCosts {
 public:
  /// attention[m]: prediction for a layer with layer_masks(config)[m].
  StepCosts(const ModelConfig& config, int tp, int64_t slots, const DecoderTypes& types,
            const MachineModel& machine, const std::vector<PassPrediction>& attention)
      : config_(config),
        tp_(tp),
        slots_(slots),
        types_(types),
        machine_(machine),
        masks_(layer_masks(config)),
        attention_(attention) {}

  DecoderTimes of(const std::vector<DecoderStep>& steps) {
    for (const DecoderStep& step : steps)
      std::visit(
          [&](const auto& operation) {
            if constexpr (std::is_same_v<decltype(operation), const decoder_step::Attention&>)
              add_attention(config_.kind_of(step.layer - 1).window);
            else
              add(operation);
          },
          step.operation);
    return times_;
  }

 private:
  void add(const decoder_step::Linear& step) {
    times_.linear += machine_.decoder.linear_seconds(types_.activations, slots_, width(step.in),
                                                     width(step.out));
  }
  void add(const decoder_step::AllReduce& step) {
    times_.tp_wait += all_reduce_seconds(bytes(step.data));
  }
  /// Adds any other step, which is bound by memory.
  template <class Step>
  void add(const Step& step) {
    times_.elementwise += work_of(step, config_, tp_, types_, slots_).bytes /
                          machine_.decoder.elementwise_bytes_per_s;
  }
  void add_attention(int64_t window) {
    const auto mask = std::ranges::find(masks_, window, &LayerMask::window) - masks_.begin();
    const PassPrediction& pass = attention_[mask];
    const double busy = std::min(pass.seconds, pass.compute_only + pass.copies_most);
    times_.attention += busy;
    times_.attention_wait += pass.seconds - busy;
  }
  void add(const decoder_step::Score& step) {
    const DecoderModel& decoder = machine_.decoder;
    times_.head += decoder.linear_seconds(types_.activations, slots_, config_.hidden_size,
                                          scored_vocab(config_, tp_)) +
                   decoder.logprob_row_s * static_cast<double>(slots_) +
                   work_of(step, config_, tp_, types_, slots_).bytes / decoder.logprob_bytes_per_s;
    constexpr double record = 16;  // bytes per slot: SoftmaxPartial and the target's logit
    if (tp_ > 1)
      times_.tp_wait += (tp_ - 1) * link().latency_s +
                        (tp_ - 1) * link().seconds(record * static_cast<double>(slots_));
  }

  int64_t width(Activation a) const { return width_of(a, config_, tp_); }
  double bytes(Activation a) const {
    return static_cast<double>(slots_ * width(a) * size_of(types_.of(a)));
  }
  /// Link between the first and the last rank of a tp group, which begins at a multiple of tp.
  const LinkTier& link() const { return machine_.links[machine_.tier_between(0, tp_ - 1)]; }
  double all_reduce_seconds(double bytes) const {
    if (tp_ == 1) return 0;
    for (const CollectiveTimes& measured : machine_.decoder.all_reduces)
      if (measured.ranks == tp_) return measured.seconds(bytes);
    return 2 * (tp_ - 1) * (link().latency_s + link().seconds(bytes / tp_));
  }

  const ModelConfig& config_;
  int tp_;
  int64_t slots_;
  DecoderTypes types_;
  const MachineModel& machine_;
  std::vector<LayerMask> masks_;
  const std::vector<PassPrediction>& attention_;
  DecoderTimes times_;
};

/// Simulates all bins; equal bins in equal places are simulated once.
class ScoringSimulation {
 public:
  ScoringSimulation(const ScoringPlan& plan, const ModelConfig& config, const MachineModel& machine)
      : plan_(plan),
        config_(config),
        types_(attention_types(plan.setup.types, plan.setup.grid.cp)),
        machine_(machine),
        steps_(decoder_steps(config)) {
    for (int d = 0; d < plan.setup.grid.dp; ++d)
      for (const int64_t bin : plan.bins_of_replica[d])
        known_.try_emplace(key_of(bin, d), Simulated{bin, first_of(d), {}});
    std::vector<Simulated*> all;
    for (auto& [key, simulated] : known_) all.push_back(&simulated);
    for_each_task(wanted_threads(), std::ssize(all), [&](int64_t i, int /*thread*/) {
      Simulated& one = *all[i];
      one.cost = simulate(plan_.bins[one.bin], one.first);
    });
  }

  /// Cost of a bin on replica `d`.
  const BinCost& cost(int64_t bin, int d) const { return known_.at(key_of(bin, d)).cost; }

 private:
  /// Real and padded boundaries, tree nodes as (descendants, length), place.
  using Key = std::tuple<std::vector<int32_t>, std::vector<int32_t>,
                         std::vector<std::pair<int32_t, int64_t>>, int64_t>;
  struct Simulated {
    int64_t bin = 0, first = 0;
    BinCost cost;
  };

  int64_t first_of(int d) const { return int64_t{d} * plan_.setup.grid.cp * plan_.setup.grid.tp; }
  /// Key of equal simulations. Its place is the first rank's position inside the last tier but one.
  Key key_of(int64_t bin, int d) const {
    const PackedBatch& batch = plan_.bins[bin];
    const size_t tiers = machine_.links.size();
    const int64_t place = tiers < 2 ? 0 : first_of(d) % machine_.links[tiers - 2].ranks;
    std::vector<std::pair<int32_t, int64_t>> nodes;
    for (const int64_t tree : batch.documents)
      for (const PrefixNode& node : plan_.forest.tree(tree))
        nodes.emplace_back(node.descendants, node.length);
    return {batch.cu_seqlens, batch.cu_seqlens_padded, std::move(nodes), place};
  }

  BinCost simulate(const PackedBatch& batch, int64_t first) const {
    const ScoringSetup& setup = plan_.setup;
    const BinLayout of_bin = plan_.layout_of(batch);
    const HeadShape heads = local_heads(config_, setup.grid.tp);
    const int64_t slots = of_bin.layout.slots_of_rank();
    BinCost cost;
    std::vector<PassPrediction> attention;
    int64_t transient = 0;
    for (size_t m = 0; m < plan_.masks.size(); ++m) {
      const AttentionProblem problem = plan_.problem(of_bin, config_, m);
      const PassPrediction pass =
          predict({*setup.schedule, problem, types_, {first, setup.grid.tp}}, machine_).front();
      const double layers = plan_.masks[m].layers;
      cost.kernel += layers * pass.kernel_mean;
      cost.extrapolated += layers * pass.kernel_mean * pass.extrapolated;
      for (const double bytes : pass.bytes_by_tier)
        cost.bytes_sent += bytes * layers * setup.grid.tp;
      cost.pairs += pass.pairs / heads.heads;
      transient = std::max(transient, pass.transient_bytes);
      attention.push_back(pass);
    }
    StepCosts costs(config_, setup.grid.tp, slots, setup.types, machine_, attention);
    cost.times = costs.of(steps_);
    cost.memory = memory_of(heads, slots) + transient;
    return cost;
  }

  /// Bytes of the activations of `slots` slots, attention included.
  int64_t memory_of(const HeadShape& heads, int64_t slots) const {
    int64_t bytes = activation_bytes(config_, plan_.setup.grid.tp, plan_.setup.types, slots);
    for (const ArrayKind kind : {ArrayKind::q, ArrayKind::kv, ArrayKind::out, ArrayKind::stats}) {
      const int64_t held = kind == ArrayKind::kv ? heads.kv_heads : heads.heads;
      bytes += slots * row_elements(kind, held, heads) * size_of(types_.stored(kind));
    }
    return bytes;
  }

  const ScoringPlan& plan_;
  const ModelConfig& config_;
  ElementTypes types_;
  const MachineModel& machine_;
  std::vector<DecoderStep> steps_;
  std::map<Key, Simulated> known_;
};

}  // namespace

ScoringPrediction predict_scoring(const ScoringPlan& plan, const ModelConfig& config,
                                  const MachineModel& machine) {
  if (plan.recurrent_layers > 0)
    throw_usage("the model has {} recurrent layers, which are not predicted",
                plan.recurrent_layers);
  const ScoringSimulation simulation(plan, config, machine);
  ScoringPrediction prediction;
  double kernel = 0, extrapolated = 0, sum = 0;
  const int replicas = plan.setup.grid.dp;
  for (int d = 0; d < replicas; ++d) {
    DecoderTimes times;
    for (const int64_t bin : plan.bins_of_replica[d]) {
      const BinCost& cost = simulation.cost(bin, d);
      times += cost.times;
      kernel += cost.kernel;
      extrapolated += cost.extrapolated;
      prediction.bytes_sent += cost.bytes_sent;
      prediction.pairs += cost.pairs;
      prediction.activation_bytes = std::max(prediction.activation_bytes, cost.memory);
    }
    sum += times.total();
    if (d == 0 || times.total() > prediction.seconds) {
      prediction.seconds = times.total();
      prediction.times = times;
    }
  }
  prediction.mean_seconds = sum / replicas;
  prediction.extrapolated = kernel > 0 ? extrapolated / kernel : 0;
  return prediction;
}

}  // namespace gyre
