#pragma once
// Duration of the attention kernel: its rate depends on the shape of a rectangle.
//
//     seconds of a call = launch + sum over rectangles and query heads of
//                         FLOPs(visible pairs) / rate(queries, keys) + diagonal · edge
//                        + merge · elements of results merged with earlier ones
//
// `rate` is the rate of an unmasked rectangle, interpolated between measured shapes in the
// logarithms of queries and keys. A mask's edge costs extra, since a kernel computes whole tiles
// along it: `edge` counts how often a query's visible keys begin or end inside the rectangle. A
// causal square of n tokens has an edge of n - 1; its last query sees all keys. `merge` applies to
// libraries, which write a new result that is then merged with the earlier one. A call takes at
// least as long as its rows take to be read and written (program.cpp).

#include <limits>
#include <span>
#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "predict/rate_surface.hpp"

namespace gyre {

/// Rates of one direction, type and head dimension. rows: queries; keys: keys of a rectangle.
struct KernelSurface : RateSurface {
  Pass pass = Pass::forward;
  DType type = DType::f32;
  int head_dim = 0;
  double launch_s = 0;    ///< time of a call beside its work
  double diagonal_s = 0;  ///< per query head and token of a mask's edge
  double merge_s = 0;     ///< time to merge an element of a result with an earlier one
};

/// Work of one kernel call.
struct ModelledCall {
  Pass pass = Pass::forward;
  DType type = DType::f32;
  int64_t query_heads = 0;
  int64_t head_dim = 0, value_dim = 0;
  std::span<const Rectangle> rectangles;
  bool d_q = true, d_kv = true;  ///< backward: gradients to compute
  int64_t merged = 0;  ///< elements of out, or of d_q, d_k and d_v, that earlier calls have written
};

/// FLOPs of a call: flops_of_pair for each of its visible pairs and query heads.
double kernel_flops(const ModelledCall& call);

struct ModelledTime {
  double seconds = 0;
  double extrapolated = 0;  ///< seconds at rectangles and head dimensions outside the measured ones
};

struct KernelModel {
  double flops_per_s = std::numeric_limits<double>::infinity();  ///< used without surfaces
  std::vector<KernelSurface> surfaces;

  /// Times are interpolated linearly between the two nearest measured head dimensions. A call whose
  /// values have another width than its keys counts as one of the mean width of its products.
  /// Throws a usage error if there are surfaces, but none of this direction and type.
  ModelledTime time(const ModelledCall& call) const;
  /// Says why time() has no answer for this direction and type; "" if it has one.
  std::string why_not(Pass pass, DType type) const;
  /// Says why time() has no answer where each query selects its keys; "" if it has one.
  std::string why_not_selected() const;
  bool measured(Pass pass, DType type, int64_t head_dim) const;  ///< whether a surface is of these
  bool merges() const;                                           ///< whether merging takes time
};

/// Number of queries whose visible keys end inside the rectangle, plus those whose begin there.
int64_t mask_edge(const Rectangle& rectangle);

}  // namespace gyre
