// Shards of one layout turned into those of another over the ranks of the run.

#include <fmt/format.h>

#include "apps/shard/report.hpp"
#include "comm/agree.hpp"
#include "sharding/distributed.hpp"

namespace gyre {
namespace {

constexpr int64_t elements = 3;  ///< of a row

/// An element of a row of the stream. Doubles hold it exactly.
double element(int64_t slot, int64_t lane) {
  return static_cast<double>(slot * elements + lane);
}

/// The rows of a rank by definition of the layout; `fill` in its padding.
std::vector<double> rows_of(const Layout& layout, int rank, double fill) {
  std::vector<double> rows;
  for (const int32_t slot : shard_index(layout, rank))
    for (int64_t lane = 0; lane < elements; ++lane)
      rows.push_back(slot < layout.stream_slots ? element(slot, lane) : fill);
  return rows;
}

/// Bytes of the rows that `rank` holds under `from` and another rank under `to`.
int64_t bytes_by_definition(const Layout& from, const Layout& to, int rank) {
  std::vector<bool> kept(from.stream_slots, false);
  for (const int32_t slot : shard_index(to, rank))
    if (slot < to.stream_slots) kept[slot] = true;
  int64_t rows = 0;
  for (const int32_t slot : shard_index(from, rank))
    if (slot < from.stream_slots && !kept[slot]) ++rows;
  return rows * elements * static_cast<int64_t>(sizeof(double));
}

}  // namespace

std::string check_relayout(ShardingPlan& from, ShardingPlan& to, Communicator& world,
                           Verification& checks) {
  const int64_t bins = from.header().bin_count();
  run_agreed(world, "--relayout", [&] {
    if (world.size() != from.cp())
      throw_usage("--relayout needs as many ranks as --cp: the run has {}, --cp is {}",
                  world.size(), from.cp());
    for (int64_t b = 0; b < bins; ++b) to.layout(b);
  });
  Verification mine(checks.tolerance_scale());
  const std::string name = fmt::format("{} to {}", from.kind().name, to.kind().name);
  Check& there = mine.check(name, 0);
  Check& back = mine.check(fmt::format("gradient of {}", name), 0);
  Check& bytes = mine.check(fmt::format("bytes of {}", name), 0);
  if (from.no_slots())
    for (Check* check : {&there, &back, &bytes}) check->add_nothing();
  int64_t sent = 0;
  for (int64_t b = 0; b < bins; ++b) {
    const Layout &old = from.layout(b), &now = to.layout(b);
    const auto turned = [&](const Layout& first, const Layout& second, double fill) {
      const SlotMoves plan = plan_relayout(first, second, world.rank());
      const int64_t before = world.traffic().bytes_sent;
      const std::vector<double> rows = rows_of(first, world.rank(), -2);
      auto result = relayout<double>(plan, world, rows, elements, fill);
      return std::pair(std::move(result), world.traffic().bytes_sent - before);
    };
    const auto [rows, forward] = turned(old, now, -1);
    const auto [gradient, backward] = turned(now, old, 0);
    there.add_all(rows, rows_of(now, world.rank(), -1), fmt::format("bin {}", b));
    back.add_all(gradient, rows_of(old, world.rank(), 0), fmt::format("bin {}", b));
    const auto where = [&] { return fmt::format("bin {} rank {}", b, world.rank()); };
    bytes.add(forward, bytes_by_definition(old, now, world.rank()), where);
    bytes.add(backward, bytes_by_definition(now, old, world.rank()), where);
    sent += forward;
  }
  const int64_t all = all_reduce_value(world, sent, ReduceOp::sum);
  mine.merge_over(world);
  checks.merge(mine);
  return fmt::format("# {}: all ranks send {} B for rows of {} B\n", name, all,
                     elements * static_cast<int64_t>(sizeof(double)));
}

}  // namespace gyre
