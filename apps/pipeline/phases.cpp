#include "apps/pipeline/phases.hpp"

#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "comm/agree.hpp"
#include "machine/rates.hpp"
#include "model/product_rate.hpp"
#include "report/table.hpp"

namespace gyre {
namespace {

struct Phase {
  std::string name;
  double seconds, work;
  const char* unit;  ///< of work per second
  double least;      ///< shortest time, in seconds, at the machine's limits
};

struct PhaseRow {
  std::string name, rate;
  double ms, share, of_limit;
};

std::vector<Phase> phases_of(const DecoderTimes& times, const PassWork& work,
                             const PhaseLimits& limits) {
  const auto least = [&](double flops, double bytes) {
    return (flops > 0 ? flops / limits.flops_per_s : 0) +
           (bytes > 0 ? bytes / limits.bytes_per_s : 0);
  };
  std::vector<Phase> phases = {
      {"products of layers", times.linear, work.linear_flops, "F/s", least(work.linear_flops, 0)},
      {"attention", times.attention, work.attention_flops, "F/s", least(work.attention_flops, 0)},
      {"norms, elementwise", times.elementwise, work.elementwise_bytes, "B/s",
       least(0, work.elementwise_bytes)},
      {"head, log-probs", times.head, work.head_flops, "F/s",
       least(work.head_flops, work.head_bytes)},
      {"attention wait", times.attention_wait, 0, "", 0},
      {"tensor-parallel wait", times.tp_wait, 0, "", 0},
  };
  if (work.recurrent) {
    phases.push_back({"recurrence", times.recurrence, work.recurrence_flops, "F/s",
                      least(work.recurrence_flops, 0)});
    phases.push_back({"states, layouts", times.recurrence_wait, 0, "", 0});
  }
  return phases;
}

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

double share_of_limit(const PassWork& work, const PhaseLimits& limits, double pass_ms,
                      Communicator& world) {
  double seconds = 0;
  for (const Phase& phase : phases_of({}, work, limits)) seconds += phase.least;
  const double longest = all_reduce_value(world, seconds, ReduceOp::max);
  return std::isfinite(longest) ? longest / (1e-3 * pass_ms) : std::nan("");
}

std::string phases_text(const DecoderTimes& times, const PassWork& work, const PhaseLimits& limits,
                        double last_ms, Communicator& world) {
  const double total = all_reduce_value(world, last_ms / 1e3, ReduceOp::max);
  std::string text = phase_table().header();
  for (const Phase& phase : phases_of(times, work, limits)) {
    const double worst = all_reduce_value(world, phase.seconds, ReduceOp::max);
    const auto slowest = [&](double part) {
      const bool known = part > 0 && phase.seconds > 0;
      return all_reduce_value(world, known ? part / phase.seconds : HUGE_VAL, ReduceOp::min);
    };
    const double rate = slowest(phase.work), of_limit = slowest(phase.least);
    text += as_comment(phase_table().row(
        {phase.name, std::isfinite(rate) ? si_text(rate, phase.unit) : "", 1e3 * worst,
         100 * worst / total, std::isfinite(of_limit) ? 100 * of_limit : std::nan("")}));
  }
  return text + fmt::format("# limits of a rank: {}, {}; {}, a copy\n",
                            si_text(limits.flops_per_s, "F/s"), limits.product,
                            si_text(limits.bytes_per_s, "B/s"));
}

}  // namespace gyre
