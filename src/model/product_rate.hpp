#pragma once
// Measures how fast a stream computes large matrix products.

#include <cstdint>

#include "core/dtype.hpp"
#include "runtime/stream.hpp"

namespace gyre {

struct ProductRate {
  int64_t side = 0;  ///< of the square matrices
  double flops_per_s = 0;
};
/// Measures products of square matrices of `type` by DecoderOps::linear. The side is doubled from
/// 64 on until a product takes a millisecond or the side is 8192. Of each side, the best of four
/// products counts.
ProductRate measure_product(DType type, Stream& stream);

}  // namespace gyre
