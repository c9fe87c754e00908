#include "attention/kernels/block_kernel.hpp"

#include <algorithm>
#include <limits>

namespace gyre {

void BlockKernel::reset(AttentionState& state) const {
  for (int64_t r = 0; r < state.out.rows; ++r) std::fill_n(state.out.row(r), state.out.cols, 0.0F);
  for (int64_t r = 0; r < state.lse.rows; ++r)
    std::fill_n(state.lse.row(r), state.lse.cols, -std::numeric_limits<float>::infinity());
}

}  // namespace gyre
