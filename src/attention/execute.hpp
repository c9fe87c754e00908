#pragma once
// Executes a rank's plan with a Communicator and a BlockKernel.

#include "attention/kernels/block_kernel.hpp"
#include "attention/plan.hpp"
#include "comm/communicator.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

/// Receive slots of a plan, kept over calls (layers) so that they are allocated once.
class KvSlots {
 public:
  /// Block of `tokens` tokens: keys [tokens, width], then values [tokens, width]; width = kv_heads
  /// · head_dim.
  KvSlots(const RankPlan& plan, int64_t width);
  std::span<float> block(int slot, int64_t tokens);

 private:
  int64_t width_;
  std::vector<Buffer<float>> slots_;
};

/// Time spent in one execution, seconds.
struct ExecutionTimes {
  double compute = 0;  ///< in the block kernel, progress calls included
  double wait = 0;     ///< in Wait steps: communication not hidden by compute
};

/// Forward attention of this rank: `queries` [slots, heads · head_dim] against the blocks of all
/// ranks, into `state`. `own_block` [2, slots, kv_heads · head_dim] is slot 0 of the plan. Rows in
/// no rectangle (padding) get O = 0, LSE = -inf. Collective over `group`, in which this rank runs
/// plan.ranks[group.rank()].
ExecutionTimes execute_forward(const RankPlan& plan, const HeadShape& shape,
                               MatrixView<const float> queries, std::span<const float> own_block,
                               KvSlots& slots, BlockKernel& kernel, Communicator& group,
                               Stream& stream, AttentionState& state);

}  // namespace gyre
