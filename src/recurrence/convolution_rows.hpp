#pragma once
// Arithmetic of the convolution on rows of f32 (Highway, dispatched at run time).

#include <cstdint>

namespace gyre {

/// Rows that lie `stride` elements apart; a negative stride reads them backwards.
struct StridedRows {
  const float* first;
  int64_t stride;
};

/// out[c] = Σ_j taps_j[c] · rows_j[c], over `width` rows of `count` elements.
void weighted_sum(StridedRows taps, StridedRows rows, int64_t width, int64_t count, float* out);
/// value[c] = z / (1 + e^-z), slope[c] = its derivative, of z[c]. value or slope may be z.
void silu_row(const float* z, int64_t count, float* value, float* slope);
/// sums[c] += a[c] · b[c]
void add_products(const float* a, const float* b, int64_t count, float* sums);

}  // namespace gyre
