#include "apps/pipeline/case.hpp"

#include <fmt/format.h>

#include "comm/agree.hpp"

namespace gyre {

ScoringCase::ScoringCase(const ScoringPlan& plan, const ScoringInputs& inputs, ProcessGrid& grid,
                         Communicator& world, Progress& progress)
    : plan_(plan),
      in_(inputs),
      config_(inputs.model.config()),
      grid_(grid),
      world_(world),
      progress_(progress),
      scorer_({inputs.documents.tokens, inputs.documents.offsets}, config_, plan, grid),
      offsets_(prediction_offsets(inputs.documents.offsets)) {}

ScoringResult ScoringCase::row() const {
  ScoringResult row;
  row.shape = plan_.setup.grid;
  row.layout = plan_.setup.layout->name;
  row.schedule = plan_.setup.schedule->name;
  row.tokens = plan_.tokens;
  row.predictions = plan_.predictions;
  row.bins = std::ssize(plan_.bins);
  row.packing = packing_efficiency(plan_.bins, plan_.capacity);
  row.flops = plan_.flops(config_);
  row.key = {{"grid", to_string(row.shape)}, {"layout", row.layout}, {"schedule", row.schedule}};
  return row;
}

void ScoringCase::run(Pass) {
  ++passes_;
  scorer_.on_progress([&](int64_t done, int64_t all) {
    progress_.detail(fmt::format("pass {}, bin {} of {}", passes_, done + 1, all));
  });
  times_ = scorer_.run(*decoder_);
  scorer_.on_progress({});
  scores_.reset();
}

SentTraffic ScoringCase::sent() const {
  SentTraffic sent;
  for (const Communicator* group : {&grid_.cp(), &grid_.tp()})
    sent += {group->traffic().messages, group->traffic().bytes_sent};
  return sent;
}

std::optional<uint64_t> ScoringCase::checksum(Pass) {
  if (plan_.predictions == 0) return {};
  return scorer_.checksum();
}

const ScoreRange& ScoringCase::scores() {
  if (!scores_) scores_ = scorer_.in_document_order(world_);
  return *scores_;
}

void ScoringCase::complete(ScoringResult& row, double last_ms) {
  row.exposed = all_reduce_value(world_, 1e3 * times_.exposed() / last_ms, ReduceOp::max);
  row.pair_imbalance =
      imbalance(all_gather_value(world_, static_cast<double>(scorer_.count().pairs)));
  row.time_imbalance = imbalance(all_gather_value(world_, times_.attention));
}

}  // namespace gyre
