#pragma once
// Ring attention (Liu et al., arXiv 2310.01889): keys and values travel, queries stay.
//
// Forward, member r of n: at step i it holds the block of member (r - i) mod n.
//
//     for i in 0 .. n-1:
//         if i < n-1: start sending the current block to r+1 and receiving the next from r-1
//         attend own queries to the current block
//         if i < n-1: wait for the transfer
//
// With --merge at-end every step but the first attends into arrays of its own, and one step merges
// them after the last (step::Merge). This is the order of TransformerEngine's ring
// (AttnFuncWithCPAndKVP2P in context_parallel.py, version of August 2026). While later steps run,
// it merges the log-sum-exps of earlier ones in f32, in the order of the steps. After the last
// step, it adds the outputs in the same order, and rounds every sum to the type of `out`, which is
// that of the activations.
//
// The transfer of step i overlaps with the computation of step i. Two receive storages suffice:
// step i reads and sends one of them while the other receives; the contents of the latter were last
// used at step i-1, which has ended.
//
// Backward starts from the block held last, member r+1's, and reverses direction: at step i member
// r holds the block of member (r + 1 + i) mod n, finally its own. The gradient of a block
// accumulates the terms of the members that it passes, one step after the block:
//
//     for i in 0 .. n-1:
//         if i < n-2: start sending the current block to r-1 and receiving the next from r+1
//         if i > 0:   start sending the last step's gradient to r-1 and receiving from r+1 the
//                     gradient accumulated so far for the current block
//         gradient of the current block = terms of own queries
//         wait; add what was received
//
// The owner of a block adds the last term, so nothing remains to be sent. Hops: n-1 forward;
// backward n-2 of the block and n-1 of its gradient. Messages: n-1 forward; n backward (1 if n =
// 2), some with a block and a gradient.

#include <array>
#include <vector>

#include "attention/schedules/builder/plan_builder.hpp"
#include "attention/schedules/schedule.hpp"

namespace gyre {

/// A ring of ranks, each with a block of keys and values. `mine` is this rank's position and `set`
/// its arrays; all blocks have the heads of set.kv.
struct Ring {
  std::vector<int> ranks;                     ///< [members]
  std::vector<std::vector<RankRows>> blocks;  ///< [members] rows of each member's block
  int mine = 0;
  ArraySet set;
  std::array<int, 2> storages{-1, -1};  ///< used in turn by received blocks
  bool merges_at_end = false;           ///< keeps the outputs of steps apart until then
  int members() const { return static_cast<int>(ranks.size()); }
};

/// Appends the steps of one pass of ring attention (see the file head). `last_block` is the result
/// of ring_forward: the array held last, where ring_backward begins.
int ring_forward(PlanBuilder& plan, const Ring& ring);
void ring_backward(PlanBuilder& plan, const Ring& ring, int last_block);

/// The plan of a ring of all ranks. With `turn_round`, backward reverses the direction.
RankPlan flat_ring_plan(const AttentionProblem& problem, int rank, bool turn_round);

/// The most bytes that copies for messages take at one time, in one pass of the ring of ring_form.
int64_t ring_copies(const FormContext& c, int members, int64_t rows, int64_t heads,
                    bool turn_round);
/// Closed form, without pairs, of one pass of a ring of `members` blocks of `rows` rows and `heads`
/// KV heads. `sees_other`, for two members: whether this rank sees any key of the other's block.
ClosedForm ring_form(const FormContext& c, int members, int64_t rows, int64_t heads,
                     bool turn_round, bool sees_other);
/// Closed form of flat_ring_plan.
ClosedForm flat_ring_form(const FormContext& c, bool turn_round);

}  // namespace gyre
