#pragma once
// Merging of partial attention results over disjoint key sets.

#include <cmath>
#include <limits>

#include "core/host_device.hpp"

namespace gyre {

/// Weights that combine two partials (O1, L1), (O2, L2): O = w1·O1 + w2·O2; `lse` is the combined
/// log-sum-exp.
template <class T>
struct MergeWeights {
  T w1, w2, lse;
};

/// M = max(L1, L2), a_i = exp(L_i - M), w_i = a_i / (a1 + a2), L = M + log(a1 + a2). Two empty
/// partials (both -inf) give (0, 0, -inf), the identity, never NaN. A NaN on either side makes all
/// results NaN.
template <class T>
GYRE_HOST_DEVICE MergeWeights<T> merge_lse(T lse1, T lse2) {
  constexpr T empty = -std::numeric_limits<T>::infinity();
  if (lse1 == empty && lse2 == empty) return {T(0), T(0), empty};
  const T top = lse1 > lse2 ? lse1 : lse2;
  const T a1 = std::exp(lse1 - top), a2 = std::exp(lse2 - top);
  const T sum = a1 + a2;
  return {a1 / sum, a2 / sum, top + std::log(sum)};
}

}  // namespace gyre
