#pragma once
// The exchanges of heads for tokens alone: steps of a plan without its attention.

#include <memory>
#include <vector>

#include "attention/execute.hpp"
#include "attention/schedules/builder/plan_builder.hpp"

namespace gyre {

/// Exchanges the arrays of all ranks of a group (attention/schedules/builder/head_exchange.hpp).
/// Forward brings q and kv to heads; backward returns out, d_q and d_kv to tokens. Arrays are f32
/// in host memory, rows [planes, heads, head_dim]; the exchanged ones have rows of all tokens in
/// the order of the stream. On one rank both are the same arrays.
class HeadsForTokens {
 public:
  /// `group` has layout.cp() ranks. Both must outlive this object. Collective.
  HeadsForTokens(Communicator& group, const Layout& layout, const HeadShape& shape);

  /// The rank's own tokens with all heads.
  MatrixView<float> tokens(ArrayKind kind) { return executor_.matrix(kind).as<float>(); }
  /// All tokens with the heads of this rank.
  MatrixView<float> heads(ArrayKind kind);
  /// The heads in heads(kind).
  HeadRange range(ArrayKind kind) const { return plan_.arrays[index_of(kind)].heads; }
  /// Collective.
  ExecutionTimes run(Pass pass) { return executor_.run(pass); }

 private:
  int index_of(ArrayKind kind) const { return exchanged_[static_cast<int>(kind)]; }

  AttentionProblem problem_;
  std::vector<int> exchanged_;  // [array_kinds], indices of arrays
  RankPlan plan_;
  std::unique_ptr<BlockKernel> kernel_;  // no step calls it
  HostStream stream_;
  AttentionWorkspace workspace_;
  AttentionExecutor executor_;
};

}  // namespace gyre
