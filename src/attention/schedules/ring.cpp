// Ring attention (Liu et al., arXiv 2310.01889): keys and values travel, queries stay.
//
// Forward, member r of n: at step i it holds the block of member (r - i) mod n.
//
//     for i in 0 .. n-1:
//         if i < n-1: start sending the current block to r+1 and receiving the next from r-1
//         attend own queries to the current block
//         if i < n-1: wait for the transfer
//
// The transfer of step i overlaps the computation of step i. Two receive storages suffice: while
// step i computes on and sends from one of them, the other receives; what it held was last used at
// step i-1, which has ended.
//
// Backward starts from the block held last, member r+1's, and turns round: at step i it holds the
// block of member (r + 1 + i) mod n, the last of which is its own. The gradient of a block collects
// the terms of the members it passes, one step behind the block:
//
//     for i in 0 .. n-1:
//         if i < n-2: start sending the current block to r-1 and receiving the next from r+1
//         if i > 0:   start sending the last step's gradient to r-1 and receiving from r+1 what the
//                     current block's gradient has collected so far
//         gradient of the current block = terms of own queries
//         wait; add what was received
//
// so that a block's owner adds the last term and nothing remains to be sent. Hops: n-1 forward; n-2
// of the block and n-1 of its gradient backward. Messages: n-1 and n (both travel as one); 1 for n
// = 2.
//
// ring-forward does not turn round: backward runs like forward from the own block on, which needs
// n-1 hops of the block and n of its gradient, the last of which nothing hides.

#include <algorithm>

#include "attention/schedules/builder.hpp"
#include "attention/schedules/registry.hpp"

namespace gyre {
namespace {

/// What one step of a backward ring moves.
struct Hop {
  std::vector<Slice> sent, received;
  void add(Slice from, Slice to) {
    sent.push_back(from);
    received.push_back(to);
  }
};

class Circle {
 public:
  Circle(PlanBuilder& plan, const Ring& ring) : plan_(plan), ring_(ring) {}

  int rank(int member) const { return ring_.ranks[wrap(member)]; }
  const std::vector<RankRows>& rows(int member) const { return ring_.blocks[wrap(member)]; }
  int block(ArrayKind kind, int member, int storage) {
    return plan_.add_array(kind, rows(member), plan_.array(ring_.set.kv).heads, storage);
  }
  /// In the storage that `other` is not in.
  int kv_block(int member, int other) {
    const auto& [a, b] = ring_.storages;
    return block(ArrayKind::kv, member, plan_.array(other).storage == a ? b : a);
  }

 private:
  size_t wrap(int member) const {
    const int n = ring_.members();
    return static_cast<size_t>((member % n + n) % n);
  }
  PlanBuilder& plan_;
  const Ring& ring_;
};

/// Backward in one direction: at step i the block of member first + i · direction is held.
/// `first_block` is its array at step 0; blocks are fetched at steps below `fetches`.
void travel_back(PlanBuilder& plan, const Ring& ring, int first, int first_block, int direction,
                 int fetches) {
  Circle circle(plan, ring);
  const int n = ring.members();
  const int ahead = circle.rank(ring.mine - direction), behind = circle.rank(ring.mine + direction);
  const std::array<int, 2> sums = {plan.new_storage(), plan.new_storage()};
  plan.delta(ring.set);
  plan.clear(ring.set.d_q);
  int current = first_block, last_sum = -1;
  for (int i = 0; i < n; ++i) {
    const int member = first + i * direction;
    const bool own_block = circle.rank(member) == plan.rank();
    const int sum = own_block && i == n - 1 ? ring.set.d_kv
                                            : circle.block(ArrayKind::d_kv, member,
                                                           sums.at(static_cast<size_t>(i % 2)));
    Hop hop;
    int next = ring.set.kv;
    if (i < fetches) {
      next = circle.kv_block(member + direction, current);
      hop.add(plan.whole(current), plan.whole(next));
    }
    if (i > 0) hop.add(plan.whole(last_sum), plan.whole(sum, true));
    const bool moves = !hop.sent.empty();
    const int id = moves ? plan.exchange(i < fetches ? (i > 0 ? "KV and dKV" : "KV") : "dKV",
                                         {{ahead, hop.sent}}, {{behind, hop.received}})
                         : -1;
    plan.clear(sum);
    plan.compute(ring.set, current, sum);
    if (moves) plan.wait(id);
    current = next;
    last_sum = sum;
  }
  if (last_sum != ring.set.d_kv) {
    plan.clear(ring.set.d_kv);
    plan.wait(plan.exchange("dKV home", {{ahead, {plan.whole(last_sum)}}},
                            {{behind, {plan.whole(ring.set.d_kv, true)}}}));
  }
  plan.sink_gradient(ring.set.stats);
}

RankPlan flat_ring(const AttentionProblem& problem, int rank, bool turn_round) {
  PlanBuilder plan(problem, rank);
  Ring ring;
  ring.mine = rank;
  for (int r = 0; r < problem.cp(); ++r) {
    ring.ranks.push_back(r);
    ring.blocks.push_back(plan.rows_of(r));
  }
  ring.storages = {plan.new_storage(), plan.new_storage()};
  const int last_block = ring_forward(plan, ring);
  plan.begin(Pass::backward);
  if (turn_round || ring.members() == 1) {
    ring_backward(plan, ring, last_block);
  } else {
    travel_back(plan, ring, ring.mine, ring.set.kv, -1, ring.members() - 1);
  }
  return plan.take();
}

}  // namespace

int ring_forward(PlanBuilder& plan, const Ring& ring) {
  Circle circle(plan, ring);
  plan.clear(ring.set.out);
  plan.clear(ring.set.stats);
  int current = ring.set.kv;
  for (int i = 0; i < ring.members(); ++i) {
    const bool more = i + 1 < ring.members();
    int next = -1, id = -1;
    if (more) {
      next = circle.kv_block(ring.mine - i - 1, current);
      id = plan.exchange("KV", {{circle.rank(ring.mine + 1), {plan.whole(current)}}},
                         {{circle.rank(ring.mine - 1), {plan.whole(next)}}});
    }
    plan.compute(ring.set, current);
    if (more) {
      plan.wait(id);
      current = next;
    }
  }
  plan.finish(ring.set);
  return current;
}

void ring_backward(PlanBuilder& plan, const Ring& ring, int last_block) {
  travel_back(plan, ring, ring.mine + 1, last_block, 1, ring.members() - 2);
}

RankPlan ring_plan(const AttentionProblem& problem, int rank) {
  return flat_ring(problem, rank, true);
}

RankPlan ring_forward_plan(const AttentionProblem& problem, int rank) {
  return flat_ring(problem, rank, false);
}

}  // namespace gyre
