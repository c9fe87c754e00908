#include "apps/pipeline/phases.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "comm/agree.hpp"
#include "machine/rates.hpp"
#include "model/product_rate.hpp"
#include "report/table.hpp"

namespace gyre {
namespace {

struct Phase {
  std::string name;
  double seconds, work, limit;  ///< limit: of work per second
  const char* unit;             ///< of work per second
};

struct PhaseRow {
  std::string name, rate;
  double ms, share, of_limit;
};

const Table<PhaseRow>& phase_table() {
  static const Table<PhaseRow> table({
      {"phase", "", 20, 0, &PhaseRow::name, Align::left},
      {"time", "ms", 9, 1, &PhaseRow::ms},
      {"share", "%", 6, 1, &PhaseRow::share},
      {"rate", "", 12, 0, &PhaseRow::rate},
      {"of_limit", "%", 8, 1, &PhaseRow::of_limit},
  });
  return table;
}

}  // namespace

PhaseLimits measure_limits(DType type, int64_t bytes, Stream& stream, Communicator& world) {
  const MachineRates rates = measure_rates(bytes, 1, world, stream);
  PhaseLimits limits{rates.flops, rates.copy, "f32 multiply-adds on registers"};
  if (stream.space() == MemorySpace::device) {
    const ProductRate product = measure_product(type, stream);
    limits.flops_per_s = all_reduce_value(world, product.flops_per_s, ReduceOp::min);
    limits.product = fmt::format("a product {0} x {0} x {0} of {1}", product.side, name_of(type));
  }
  return limits;
}

std::string phases_text(const DecoderTimes& times, const PassWork& work, const PhaseLimits& limits,
                        double last_ms, Communicator& world) {
  const Phase phases[] = {
      {"products", times.linear, work.linear_flops, limits.flops_per_s, "F/s"},
      {"attention", times.attention, work.attention_flops, limits.flops_per_s, "F/s"},
      {"norms, elementwise", times.elementwise, work.elementwise_bytes, limits.bytes_per_s, "B/s"},
      {"log-probs", times.logprobs, work.logprob_bytes, limits.bytes_per_s, "B/s"},
      {"attention wait", times.attention_wait, 0, 0, ""},
      {"tensor-parallel wait", times.tp_wait, 0, 0, ""},
  };
  const double total = all_reduce_value(world, last_ms / 1e3, ReduceOp::max);
  std::string text = phase_table().header();
  for (const Phase& phase : phases) {
    const double worst = all_reduce_value(world, phase.seconds, ReduceOp::max);
    const double mine = phase.work > 0 && phase.seconds > 0
                            ? phase.work / phase.seconds
                            : std::numeric_limits<double>::infinity();
    const double rate = all_reduce_value(world, mine, ReduceOp::min);
    const bool known = std::isfinite(rate) && phase.work > 0;
    text += as_comment(phase_table().row(
        {phase.name, known ? si_text(rate, phase.unit) : "", 1e3 * worst, 100 * worst / total,
         known && phase.limit > 0 ? 100 * rate / phase.limit : std::nan("")}));
  }
  return text + fmt::format("# limits of a rank: {}, {}; {}, a copy\n",
                            si_text(limits.flops_per_s, "F/s"), limits.product,
                            si_text(limits.bytes_per_s, "B/s"));
}

}  // namespace gyre
