#include <fmt/format.h>

#include "apps/shard/report.hpp"
#include "comm/agree.hpp"
#include "sharding/distributed.hpp"

namespace gyre {
namespace {

constexpr std::pair<const char*, GatherGradient> conventions[] = {
    {"split", GatherGradient::split},
    {"sum", GatherGradient::sum},
    {"none", GatherGradient::none},
};

/// Gradient that `rank` has for a slot of the stream. It is a small integer, so that sums over
/// ranks are exact.
double gradient(int rank, int64_t slot) {
  return (rank + 1) * (slot % 1000 + 1);
}

/// The gradient of a local slot by the definition of the convention.
double expected_gradient(GatherGradient convention, int rank, int ranks, int64_t slot) {
  if (convention == GatherGradient::none) return 0;
  if (convention == GatherGradient::split) return gradient(rank, slot);
  double sum = 0;
  for (int r = 0; r < ranks; ++r) sum += gradient(r, slot);
  return sum;
}

/// Checks one convention over all bins. Returns the bytes that this rank sent.
int64_t check_convention(ShardingPlan& plan, GatherGradient convention, Communicator& world,
                         Check& check) {
  int64_t sent = 0;
  for (int64_t b = 0; b < plan.header().bin_count(); ++b) {
    const Layout& layout = plan.layout(b);
    std::vector<double> whole;
    for (int64_t t = 0; t < layout.stream_slots; ++t) whole.push_back(gradient(world.rank(), t));
    const int64_t before = world.traffic().bytes_sent;
    const std::vector<double> mine = gather_stream_backward<double>(
        layout, world, std::span<const double>(whole), 1, convention);
    sent += world.traffic().bytes_sent - before;
    std::vector<double> expected;
    for (const int32_t slot : shard_index(layout, world.rank()))
      expected.push_back(slot < layout.stream_slots
                             ? expected_gradient(convention, world.rank(), world.size(), slot)
                             : 0);
    check.add_all(mine, expected, fmt::format("bin {} gradient", b));
  }
  return sent;
}

}  // namespace

std::string check_gather_gradients(ShardingPlan& plan, const std::string& convention,
                                   Communicator& world, Verification& checks) {
  run_agreed(world, "--gather-gradient", [&] {
    if (world.size() != plan.cp())
      throw_usage("--gather-gradient gathers over the run's ranks: {} of them, --cp {}",
                  world.size(), plan.cp());
  });
  Verification mine(checks.tolerance_scale());
  std::string text;
  for (const auto& [name, kind] : conventions) {
    if (convention != "all" && convention != name) continue;
    Check& check = mine.check(fmt::format("gathered gradient, {}", name), 0);
    if (plan.no_slots()) check.add_nothing();
    const int64_t sent = check_convention(plan, kind, world, check);
    text += fmt::format(
        "# {} gradient of a gather, {}: {} B sent by all ranks, their agreement included\n",
        plan.kind().name, name, all_reduce_value(world, sent, ReduceOp::sum));
  }
  mine.merge_over(world);
  checks.merge(mine);
  return text;
}

}  // namespace gyre
