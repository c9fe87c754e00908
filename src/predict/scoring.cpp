#include "predict/scoring.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "model/decoder_steps.hpp"
#include "predict/predict.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

/// Cost of a bin over all layers.
struct BinCost {
  DecoderTimes times;
  RecurrentPrediction recurrent;
  double kernel = 0, extrapolated = 0;  ///< seconds, over all ranks
  double bytes_sent = 0;
  int64_t pairs = 0;
  int64_t memory = 0;  ///< bytes of a rank
};

/// Adds up the costs of one bin's steps on one rank.
class StepCosts {
 public:
  StepCosts(const ModelConfig& config, int tp, const DecoderTypes& types,
            const MachineModel& machine, const AttentionPart& attention, const StatesPart& states,
            const RelayoutPart& relayout)
      : config_(config),
        tp_(tp),
        slots_(attention.slots),
        types_(types),
        machine_(machine),
        masks_(layer_masks(config)),
        attention_(attention.masks),
        states_(states),
        relayout_(relayout) {}

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
    times_.linear += machine_.decoder.linear_seconds(types_.activations, rows_of(step.in),
                                                     width(step.in), width(step.out));
  }
  void add(const decoder_step::AllReduce& step) {
    times_.tp_wait += all_reduce_seconds(bytes(step.data));
  }
  void add(const decoder_step::Relayout& step) {
    const bool there = is_of_recurrent_layers(step.to);
    times_.recurrence_wait += (there ? relayout_.there : relayout_.back).seconds;
  }
  void add(const decoder_step::Recurrence& step) {
    times_.elementwise += work_of(step, config_, tp_, types_, states_.slots).bytes /
                          machine_.decoder.elementwise_bytes_per_s;
    add_busy(states_.pass, times_.recurrence, times_.recurrence_wait);
  }
  /// Adds any other step, which is bound by memory.
  template <class Step>
  void add(const Step& step) {
    times_.elementwise += work_of(step, config_, tp_, types_, slots_).bytes /
                          machine_.decoder.elementwise_bytes_per_s;
  }
  void add_attention(int64_t window) {
    const auto mask = std::ranges::find(masks_, window, &LayerMask::window) - masks_.begin();
    add_busy(attention_[mask], times_.attention, times_.attention_wait);
  }
  static void add_busy(const PassPrediction& pass, double& busy, double& wait) {
    const double works = std::min(pass.seconds, pass.compute_only + pass.copies_most);
    busy += works;
    wait += pass.seconds - works;
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
  int64_t rows_of(Activation a) const {
    if (!is_of_recurrent_layers(a)) return slots_;
    return a < Activation::mixer_out ? relayout_.rows : states_.slots;
  }
  double bytes(Activation a) const {
    return static_cast<double>(rows_of(a) * width(a) * size_of(types_.of(a)));
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
  const StatesPart& states_;
  const RelayoutPart& relayout_;
  DecoderTimes times_;
};

/// The bins of a plan, of parts that are known or simulated now.
class ScoringSimulation {
 public:
  ScoringSimulation(const ScoringPlan& plan, const ModelConfig& config, const MachineModel& machine,
                    ScoringParts& parts)
      : plan_(plan),
        config_(config),
        machine_(machine),
        types_(attention_types(plan.setup.types, plan.setup.grid.cp)),
        steps_(decoder_steps(config)) {
    const ScoringSetup& setup = plan.setup;
    const std::string &layout = setup.layout->name, &recurrent = setup.recurrent_layout->name;
    std::map<BinKey, BinPlace> bins;
    for (int d = 0; d < setup.grid.dp; ++d)
      for (const int64_t bin : plan.bins_of_replica[d])
        bins.try_emplace(key_of(bin, d), BinPlace{&plan.bins[bin], first_of(d)});
    const PartSimulation simulation(plan, config, machine);
    const auto learn = [&](auto& known, const std::string& names, auto simulate) {
      std::vector<std::pair<PartKey, BinPlace>> missing;
      for (const auto& [bin, place] : bins)
        if (PartKey key{names, bin}; !known.contains(key)) missing.emplace_back(key, place);
      std::vector<decltype((simulation.*simulate)({}))> made(missing.size());
      for_each_task(wanted_threads(), std::ssize(missing), [&](int64_t i, int /*thread*/) {
        made[i] = (simulation.*simulate)(missing[i].second);
      });
      for (size_t i = 0; i < made.size(); ++i) known.emplace(missing[i].first, std::move(made[i]));
      return [&known, names](const BinKey& bin) { return known.at({names, bin}); };
    };
    const auto attention =
        learn(parts.attention, setup.schedule->name + " " + layout, &PartSimulation::attention);
    if (plan.recurrent_layers == 0) {
      for (const auto& [bin, place] : bins) costs_[bin] = cost_of(attention(bin), {}, {});
      return;
    }
    const auto states =
        learn(parts.states, setup.state_schedule->name + " " + recurrent, &PartSimulation::states);
    const auto relayout =
        learn(parts.relayout, layout + " " + recurrent, &PartSimulation::relayout);
    for (const auto& [bin, place] : bins)
      costs_[bin] = cost_of(attention(bin), states(bin), relayout(bin));
  }

  /// Cost of a bin on replica `d`.
  const BinCost& cost(int64_t bin, int d) const { return costs_.at(key_of(bin, d)); }

 private:
  int64_t first_of(int d) const { return int64_t{d} * plan_.setup.grid.cp * plan_.setup.grid.tp; }
  BinKey key_of(int64_t bin, int d) const {
    const PackedBatch& batch = plan_.bins[bin];
    const size_t tiers = machine_.links.size();
    BinKey key{
        plan_.setup.grid.cp, plan_.setup.grid.tp, batch.cu_seqlens, batch.cu_seqlens_padded, {}, 0};
    if (tiers >= 2) key.place = first_of(d) % machine_.links[tiers - 2].ranks;
    for (const int64_t tree : batch.documents)
      for (const PrefixNode& node : plan_.forest.tree(tree))
        key.nodes.emplace_back(node.descendants, node.length);
    return key;
  }

  BinCost cost_of(const AttentionPart& attention, const StatesPart& states,
                  const RelayoutPart& relayout) const {
    const int tp = plan_.setup.grid.tp;
    const HeadShape heads = local_heads(config_, tp);
    BinCost cost;
    int64_t transient = states.pass.transient_bytes;
    for (size_t m = 0; m < plan_.masks.size(); ++m) {
      const PassPrediction& pass = attention.masks[m];
      const double layers = plan_.masks[m].layers;
      cost.kernel += layers * pass.kernel_mean;
      cost.extrapolated += layers * pass.kernel_mean * pass.extrapolated;
      for (const double bytes : pass.bytes_by_tier) cost.bytes_sent += bytes * layers * tp;
      cost.pairs += pass.pairs / heads.heads;
      transient = std::max(transient, pass.transient_bytes);
    }
    StepCosts costs(config_, tp, plan_.setup.types, machine_, attention, states, relayout);
    cost.times = costs.of(steps_);
    cost.recurrent.add({2, relayout.there.seconds + relayout.back.seconds,
                        relayout.projected_seconds, states.sent, relayout.sent, relayout.projected},
                       plan_.recurrent_layers);
    cost.memory = memory_of(heads, std::max(attention.slots, relayout.rows)) + transient;
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
  const MachineModel& machine_;
  ElementTypes types_;
  std::vector<DecoderStep> steps_;
  std::map<BinKey, BinCost> costs_;
};

}  // namespace

void RecurrentPrediction::add(const RecurrentPrediction& other, int64_t times) {
  relayouts += times * other.relayouts;
  relayout_seconds += static_cast<double>(times) * other.relayout_seconds;
  projected_seconds += static_cast<double>(times) * other.projected_seconds;
  states.add(other.states, times);
  relayout.add(other.relayout, times);
  projected.add(other.projected, times);
}

SentByRanks RecurrentPrediction::sent() const {
  SentByRanks all = states;
  all.add(relayout, 1);
  return all;
}

ScoringPredictor::ScoringPredictor(const ModelConfig& config, const MachineModel& machine)
    : config_(config), machine_(machine) {}

ScoringPrediction ScoringPredictor::predict(const ScoringPlan& plan) {
  const ScoringSimulation simulation(plan, config_, machine_, parts_);
  ScoringPrediction prediction;
  double kernel = 0, extrapolated = 0, sum = 0;
  const int replicas = plan.setup.grid.dp;
  for (int d = 0; d < replicas; ++d) {
    DecoderTimes times;
    RecurrentPrediction recurrent;
    for (const int64_t bin : plan.bins_of_replica[d]) {
      const BinCost& cost = simulation.cost(bin, d);
      times += cost.times;
      recurrent.add(cost.recurrent, 1);
      kernel += cost.kernel;
      extrapolated += cost.extrapolated;
      prediction.bytes_sent += cost.bytes_sent;
      prediction.pairs += cost.pairs;
      prediction.activation_bytes = std::max(prediction.activation_bytes, cost.memory);
    }
    sum += times.total();
    prediction.recurrent_bytes += recurrent.sent().bytes() * plan.setup.grid.tp;
    if (d == 0 || times.total() > prediction.seconds) {
      prediction.seconds = times.total();
      prediction.times = times;
      prediction.recurrent = recurrent;
    }
  }
  prediction.mean_seconds = sum / replicas;
  prediction.extrapolated = kernel > 0 ? extrapolated / kernel : 0;
  return prediction;
}

}  // namespace gyre
