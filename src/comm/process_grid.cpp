#include "comm/process_grid.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/error.hpp"

namespace gyre {
namespace {

double distance(const GridShape& a, const GridShape& b) {
  const auto term = [](int x, int y) {
    return std::abs(std::log(static_cast<double>(x) / std::max(1, y)));
  };
  return term(a.dp, b.dp) + term(a.cp, b.cp) + term(a.tp, b.tp);
}

}  // namespace

std::string to_string(const GridShape& shape) {
  return fmt::format("dp={} cp={} tp={}", shape.dp, shape.cp, shape.tp);
}

std::vector<GridShape> nearest_grids(const GridShape& wanted, int ranks,
                                     const std::vector<int>& allowed_tp) {
  std::vector<GridShape> shapes;
  for (int tp : allowed_tp) {
    if (ranks % tp != 0) continue;
    for (int cp = 1; cp <= ranks / tp; ++cp)
      if (ranks / tp % cp == 0) shapes.push_back({ranks / tp / cp, cp, tp});
  }
  std::stable_sort(shapes.begin(), shapes.end(), [&](const GridShape& a, const GridShape& b) {
    return distance(a, wanted) < distance(b, wanted);
  });
  return shapes;
}

ProcessGrid::ProcessGrid(Communicator& world, const GridShape& shape)
    : world_(world), shape_(shape) {
  GYRE_CHECK(world.size() == shape.ranks(), "{} ranks for {}", world.size(), to_string(shape));
  tp_rank_ = world.rank() % shape.tp;
  cp_rank_ = world.rank() / shape.tp % shape.cp;
  dp_rank_ = world.rank() / (shape.tp * shape.cp);
  tp_ = world.split(world.rank() / shape.tp);
  cp_ = world.split(dp_rank_ * shape.tp + tp_rank_);
}

}  // namespace gyre
