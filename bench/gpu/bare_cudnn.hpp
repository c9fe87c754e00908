#pragma once
// cuDNN's fused attention called directly, as in its own samples, on one causal sequence: the
// baseline of the executor.

#include <memory>

#include "attention/kernels/block_kernel.hpp"
#include "runtime/stream.hpp"

namespace gyre::bench {

class BareCudnn {
 public:
  virtual ~BareCudnn() = default;
  virtual void forward() = 0;
  virtual void backward() = 0;
  /// Whether the backward pass gives the same bits in every run.
  virtual bool ordered() const = 0;
};

/// The caller's arrays: [tokens, heads · head_dim] in bf16, lse [heads, tokens] in f32.
struct BareArrays {
  const void *q, *k, *v, *d_out;
  void *out, *lse, *d_q, *d_k, *d_v;
};
/// `ordered`: uses an ordered backward pass where our kernel (cuda_ragged_kernel.hpp) would. Throws
/// a runtime error if cuDNN is missing or refuses.
std::unique_ptr<BareCudnn> make_bare_cudnn(Stream& stream, const HeadShape& heads, int64_t tokens,
                                           const BareArrays& arrays, bool ordered);

}  // namespace gyre::bench
