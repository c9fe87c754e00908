#pragma once
// How long the attention kernel takes: a rate that depends on the shape of a rectangle.
//
//     seconds of a call = launch + sum over rectangles and query heads of
//                         FLOPs(visible pairs) / rate(queries, keys) + diagonal · edge
//                       + merge · elements of results that were there before
//
// `rate` is that of a rectangle without a mask, interpolated between measured shapes in the
// logarithms of queries and keys. A mask's edge costs extra, since a kernel computes whole tiles
// along it: `edge` is how often a query's row of visible keys ends or begins inside of the
// rectangle. A causal square of n tokens has an edge of n - 1; its last query sees all keys.
// `merge` is of libraries, which write a result of their own, to be merged with what was there.

#include <limits>
#include <span>
#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "predict/rate_surface.hpp"

namespace gyre {

/// Rates of one direction, type and head dimension: rows are queries of a rectangle, keys its keys.
struct KernelSurface : RateSurface {
  Pass pass = Pass::forward;
  DType type = DType::f32;
  int head_dim = 0;
  double launch_s = 0;    ///< of a call
  double diagonal_s = 0;  ///< of a query head and a token of a mask's edge
  double merge_s = 0;     ///< of an element of a result that is merged with an earlier one
};

/// What a call computes.
struct ModelledCall {
  Pass pass = Pass::forward;
  DType type = DType::f32;
  int64_t query_heads = 0;
  int64_t head_dim = 0;
  std::span<const Rectangle> rectangles;
  bool d_q = true, d_kv = true;  ///< backward: which gradients
  int64_t merged = 0;  ///< elements of out, or of d_q, d_k and d_v, that were there before
};

/// FLOPs of a call: 4 · head_dim for each visible pair and query head forward (two products);
/// backward 10 (five), or 6 for d_q alone, 8 for d_kv alone.
double kernel_flops(const ModelledCall& call);

struct ModelledTime {
  double seconds = 0;
  double extrapolated = 0;  ///< seconds of rectangles and head dimensions outside of what is known
};

struct KernelModel {
  double flops_per_s = std::numeric_limits<double>::infinity();  ///< where there is no surface
  std::vector<KernelSurface> surfaces;

  /// Between the two nearest head dimensions that are known, times are interpolated linearly.
  /// Throws a usage error where surfaces exist, but none of this direction and type.
  ModelledTime time(const ModelledCall& call) const;
  std::string why_not(Pass pass, DType type) const;  ///< "" where time() has an answer
  bool merges() const;                               ///< whether merging takes time
};

/// Queries with 0 < end_key < k_length, plus, under a window, those with 0 < begin_key < k_length.
int64_t mask_edge(const Rectangle& rectangle);

}  // namespace gyre
