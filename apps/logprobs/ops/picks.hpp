#pragma once
// Base class of raw-gather and the distillations.

#include <span>
#include <vector>

#include "apps/logprobs/op.hpp"

namespace gyre {

/// Base of operations on a token's ids, with values and gradients [rows, picks].
class PicksOp : public RowsOp {
 public:
  explicit PicksOp(LogprobsContext& context)
      : RowsOp(context),
        picks_(context.problem.picks),
        values_(rows_.rows() * picks_),
        d_values_(rows_.rows() * picks_) {
    for (int64_t k = 0; k < picks_; ++k) {
      const std::vector<float> g = rows_.gradients(2 + k);
      for (int64_t r = 0; r < rows_.rows(); ++r) d_values_[r * picks_ + k] = g[r];
    }
  }

 protected:
  std::vector<std::span<float>> outputs() override { return {values_.span()}; }
  std::span<const int32_t> ids_of(int64_t r) const {
    return rows_.ids().subspan(r * picks_, picks_);
  }
  std::vector<double> gradients_of(int64_t r) const {
    const float* first = d_values_.data() + r * picks_;
    return {first, first + picks_};
  }

  int64_t picks_;
  Buffer<float> values_, d_values_;  // [rows, picks]
};

}  // namespace gyre
