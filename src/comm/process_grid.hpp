#pragma once
// The dp × cp × tp grid of ranks, tp fastest: rank = (d · cp + c) · tp + t
//
// Example, 8 ranks as dp = 2, cp = 2, tp = 2:
//     rank   0 1 2 3 4 5 6 7
//     d      0 0 0 0 1 1 1 1      tp groups  {0,1} {2,3} {4,5} {6,7}
//     c      0 0 1 1 0 0 1 1      cp groups  {0,2} {1,3} {4,6} {5,7}
//     t      0 1 0 1 0 1 0 1      dp groups  {0,4} {1,5} {2,6} {3,7}
// The ranks of a tp group communicate most (two all-reduces per layer), so they are consecutive.

#include <memory>
#include <vector>

#include "comm/communicator.hpp"

namespace gyre {

struct GridShape {
  int dp = 1;
  int cp = 1;
  int tp = 1;
  int ranks() const { return dp * cp * tp; }
  friend bool operator==(const GridShape&, const GridShape&) = default;
};

/// Text such as "dp=2 cp=2 tp=1".
std::string to_string(const GridShape& shape);

/// All shapes of exactly `ranks` ranks with tp in `allowed_tp`, nearest to `wanted` first
/// (distance: sum of |log ratio| of the three sizes).
std::vector<GridShape> nearest_grids(const GridShape& wanted, int ranks,
                                     const std::vector<int>& allowed_tp);

class ProcessGrid {
 public:
  /// Collective over `world`, whose size must be shape.ranks().
  ProcessGrid(Communicator& world, const GridShape& shape);

  const GridShape& shape() const { return shape_; }
  int dp_rank() const { return dp_rank_; }
  int cp_rank() const { return cp_rank_; }
  int tp_rank() const { return tp_rank_; }
  Communicator& world() { return world_; }
  Communicator& cp() { return *cp_; }
  Communicator& tp() { return *tp_; }

 private:
  Communicator& world_;
  GridShape shape_;
  int dp_rank_, cp_rank_, tp_rank_;
  std::unique_ptr<Communicator> cp_, tp_;
};

}  // namespace gyre
