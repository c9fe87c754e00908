// --recurrence: predictions of one recurrent layer (run.hpp).

#include <fmt/format.h>

#include "apps/predict/run.hpp"
#include "core/error.hpp"
#include "predict/recurrence_program.hpp"
#include "sharding/padded_layout.hpp"

namespace gyre {
namespace {

/// Each plan lists what all ranks send, so that plans of all ranks grow as cp².
constexpr int most_ranks = 2048;

}  // namespace

std::vector<PredictedRow> predict_case(const PredictedCase<StateSchedule>& c,
                                       Verification& checks) {
  if (c.cp > most_ranks)
    throw_usage("schedule {}: cp {} has too large plans of states; at most {}", c.schedule.name,
                c.cp, most_ranks);
  const PredictOptions& o = c.options;
  const DType type = o.types().activations;
  const PaddedLayout placed(c.documents.offsets, c.layout, o.layout.for_ranks(c.cp));
  const RecurrenceProblem problem(&placed.layout, o.recurrence_shape(), type);
  const RecurrenceShape& shape = problem.shape;
  std::vector<Pass> passes;
  for (const Pass pass : {Pass::forward, Pass::backward})
    if (o.wants(pass)) passes.push_back(pass);
  const PredictedRecurrence predicted{c.schedule, problem, o.recurrence, {0, o.tp}};
  std::vector<PredictedRow> rows;
  for (PassPrediction& prediction : predict(predicted, passes, c.machine)) {
    const int64_t tokens = c.documents.tokens();
    checks.check("tokens of all plans", 0).add(prediction.pairs, tokens * shape.value_heads, [&] {
      return fmt::format("{} under {}, cp {}", c.schedule.name, c.layout.name, c.cp);
    });
    const Pass pass = prediction.pass;
    PredictedRow& row = rows.emplace_back(row_of(c, std::move(prediction)));
    row.flops = recurrence_flops(pass, tokens, shape);
    row.own_bytes = bytes_of_arrays(shape, type, placed.layout.slots_of_rank());
  }
  return rows;
}

}  // namespace gyre
