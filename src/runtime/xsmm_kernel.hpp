#pragma once
// Small f32 products that libxsmm generates at run time.

#include <libxsmm.h>

#include <cstdint>

namespace gyre {

/// c [rows, columns] = a [rows, depth] · b [depth, columns], or c += if `accumulate`; row-major.
struct SmallProduct {
  int64_t rows, columns, depth;
  int64_t a_stride, b_stride, c_stride;
  bool a_transposed;  ///< a is [depth, rows]
  bool accumulate;
};

/// Returns the kernel for this product, to be called as kernel(b, a, c): libxsmm is column-major,
/// so cᵀ = bᵀ · aᵀ is computed, and nothing is transposed in memory. libxsmm caches kernels by
/// shape. Throws if it has none for this processor.
libxsmm_smmfunction xsmm_kernel(const SmallProduct& product);

}  // namespace gyre
