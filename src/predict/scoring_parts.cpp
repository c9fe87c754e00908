#include "predict/scoring_parts.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "predict/recurrence_program.hpp"
#include "predict/relayout_program.hpp"

namespace gyre {
namespace {

std::string rated_kind() {
  return kind_of_recurrent_layers().name;
}

SentByRanks sent_by(const std::vector<SlotMoves>& moves, int64_t row_bytes) {
  SentByRanks sent;
  for (const SlotMoves& of_rank : moves) {
    RecurrentTraffic& traffic = sent.ranks.emplace_back();
    for (const SlotMoves::Message& m : of_rank.sends)
      traffic += {1, std::ssize(m.slots) * row_bytes};
  }
  return sent;
}

}  // namespace

void SentByRanks::add(const SentByRanks& other, int64_t times) {
  ranks.resize(std::max(ranks.size(), other.ranks.size()));
  for (size_t r = 0; r < other.ranks.size(); ++r) ranks[r] += times * other.ranks[r];
}

RecurrentTraffic SentByRanks::most() const {
  RecurrentTraffic most;
  for (const RecurrentTraffic& rank : ranks)
    most = {std::max(most.messages, rank.messages), std::max(most.bytes, rank.bytes)};
  return most;
}

int64_t SentByRanks::bytes() const {
  int64_t sum = 0;
  for (const RecurrentTraffic& rank : ranks) sum += rank.bytes;
  return sum;
}

AttentionPart PartSimulation::attention(const BinPlace& at) const {
  const BinLayout of_bin = plan_.layout_of(*at.bin);
  const ElementTypes types = attention_types(plan_.setup.types, plan_.setup.grid.cp);
  AttentionPart part;
  part.slots = of_bin.layout.slots_of_rank();
  for (size_t m = 0; m < plan_.masks.size(); ++m) {
    const AttentionProblem problem = plan_.problem(of_bin, config_, m);
    part.masks.push_back(
        predict({*plan_.setup.schedule, problem, types, place(at)}, machine_).front());
  }
  return part;
}

StatesPart PartSimulation::states(const BinPlace& at) const {
  const BinLayout of_bin = plan_.layout_of(*at.bin);
  const RecurrentProblem layer = plan_.recurrent_problem(of_bin, config_);
  if (const std::string why = recurrent_refusal(layer); !why.empty())
    throw_usage("recurrent layout {}, states {}: {}", layer.recurrent.name, layer.schedule.name,
                why);
  const RecurrenceProblem problem(&of_bin.recurrent, recurrence_shape(config_, layer.tp));
  StatesPart part;
  part.slots = of_bin.recurrent.slots_of_rank();
  part.pass = predict(PredictedRecurrence{layer.schedule, problem, rated_kind(), place(at),
                                          rated_type(problem.type)},
                      {Pass::forward}, machine_)
                  .front();
  for (int rank = 0; rank < problem.cp(); ++rank) {
    const StateCount sent =
        count(plan_rank(layer.schedule, problem, rank), Pass::forward, problem.shape);
    part.sent.ranks.push_back({sent.messages, sent.bytes_sent});
  }
  return part;
}

RelayoutPart PartSimulation::relayout(const BinPlace& at) const {
  const BinLayout of_bin = plan_.layout_of(*at.bin);
  const RecurrentProblem layer = plan_.recurrent_problem(of_bin, config_);
  std::vector<SlotMoves> there, back;
  RelayoutPart part;
  for (int rank = 0; rank < layer.recurrent.cp(); ++rank) {
    RecurrentPlan planned = plan_recurrent(layer, rank);
    part.rows = std::max(part.rows, planned.rows());
    there.push_back(std::move(planned.there));
    back.push_back(std::move(planned.back));
  }
  const auto moved = [&](const std::vector<SlotMoves>& moves,
                         const std::vector<Activation>& columns, SentByRanks& sent) {
    int64_t row = 0;
    for (const Activation a : columns) row += width_of(a, config_, layer.tp);
    row *= static_cast<int64_t>(size_of(layer.activations));
    sent.add(sent_by(moves, row), 1);
    return predict_relayout(moves, row, machine_, place(at));
  };
  using A = Activation;
  part.there = moved(there, {A::mixer_in}, part.sent);
  part.back = moved(back, {A::mixer_partial}, part.sent);
  part.projected_seconds =
      moved(there, {A::mixer_q, A::mixer_k, A::mixer_v, A::mixer_z, A::mixer_b, A::mixer_a},
            part.projected)
          .seconds +
      moved(back, {A::mixer_out}, part.projected).seconds;
  return part;
}

DType PartSimulation::rated_type(DType computed) const {
  const bool rated = machine_.recurrence.why_not(rated_kind(), Pass::forward, computed).empty();
  return rated ? computed : plan_.setup.types.activations;
}

}  // namespace gyre
