#include "attention/schedules/builder/ring_steps.hpp"

#include <algorithm>
#include <array>

#include "attention/schedules/builder/forms.hpp"

namespace gyre {
namespace {

/// Slices that one step of the backward pass sends and receives.
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
  /// Adds an array for a member's keys and values, in the storage that array `other` does not use.
  int kv_block(int member, int other) {
    const auto& [a, b] = ring_.storages;
    return block(ArrayKind::kv, member, plan_.array(other).storage == a ? b : a);
  }

 private:
  size_t wrap(int member) const {
    const int n = ring_.members();
    return (member % n + n) % n;
  }
  PlanBuilder& plan_;
  const Ring& ring_;
};

/// Appends a backward pass whose step i computes with the block of member first + i · direction.
/// Array `first_block` has the block of step 0; steps below `fetches` receive the next block.
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
                                            : circle.block(ArrayKind::d_kv, member, sums.at(i % 2));
    Hop hop;
    int next = ring.set.kv;
    if (i < fetches) {
      next = circle.kv_block(member + direction, current);
      hop.add(plan.whole(current), plan.whole(next));
    }
    if (i > 0) hop.add(plan.whole(last_sum), plan.whole(sum, true));
    const bool moves = !hop.sent.empty();
    const int id =
        moves ? plan.exchange_pair(i < fetches ? (i > 0 ? "KV and dKV" : "KV") : "dKV",
                                   {ahead, std::move(hop.sent)}, {behind, std::move(hop.received)})
              : -1;
    plan.clear(sum);
    plan.compute(ring.set, current, sum);
    if (moves) plan.wait(id);
    current = next;
    last_sum = sum;
  }
  if (last_sum != ring.set.d_kv) {
    plan.clear(ring.set.d_kv);
    plan.wait(plan.exchange_pair("dKV home", {ahead, {plan.whole(last_sum)}},
                                 {behind, {plan.whole(ring.set.d_kv, true)}}));
  }
  plan.sink_gradient(ring.set.stats);
}

}  // namespace

int ring_forward(PlanBuilder& plan, const Ring& ring) {
  Circle circle(plan, ring);
  plan.clear(ring.set.out);
  plan.clear(ring.set.stats);
  int current = ring.set.kv;
  step::Merge merge{ring.set.out, ring.set.stats, {}};
  for (int i = 0; i < ring.members(); ++i) {
    const bool more = i + 1 < ring.members();
    int next = -1, id = -1;
    if (more) {
      next = circle.kv_block(ring.mine - i - 1, current);
      id = plan.exchange_pair("KV", {circle.rank(ring.mine + 1), {plan.whole(current)}},
                              {circle.rank(ring.mine - 1), {plan.whole(next)}});
    }
    ArraySet set = ring.set;
    if (ring.merges_at_end && i > 0) {
      for (int* array : {&set.out, &set.stats}) {
        const PlanArray like = plan.array(*array);
        *array = plan.add_array(like.kind, like.rows, like.heads);
        plan.clear(*array);
      }
      merge.partials.push_back({set.out, set.stats});
    }
    plan.compute(set, current);
    if (more) {
      plan.wait(id);
      current = next;
    }
  }
  if (!merge.partials.empty()) plan.add(std::move(merge));
  plan.finish(ring.set);
  return current;
}

void ring_backward(PlanBuilder& plan, const Ring& ring, int last_block) {
  travel_back(plan, ring, ring.mine + 1, last_block, 1, ring.members() - 2);
}

RankPlan flat_ring_plan(const AttentionProblem& problem, int rank, bool turn_round) {
  PlanBuilder plan(problem, rank);
  Ring ring;
  ring.mine = rank;
  ring.merges_at_end = merges_at_end(problem);
  for (int r = 0; r < problem.cp(); ++r) {
    ring.ranks.push_back(r);
    ring.blocks.push_back(plan.rows_of(r, ArrayKind::kv));
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

namespace {

/// Numbers of hops of keys and values, of hops of their gradients, and of messages, in one pass.
struct Hops {
  int64_t kv, d_kv = 0, messages;
  Hops(int64_t members, bool forward, bool turn_round) : kv(members - 1), messages(kv) {
    if (forward) return;
    kv = turn_round ? members - 2 : members - 1;
    d_kv = turn_round ? members - 1 : members;
    // A block and the gradients of the previous block travel as one message. The first block and
    // the gradients of the last block travel alone, as do the own block's if they must be returned.
    messages = turn_round ? (members == 2 ? 1 : members) : members + 1;
  }
};

}  // namespace

int64_t ring_copies(const FormContext& c, int members, int64_t rows, int64_t heads,
                    bool turn_round) {
  if (members == 1 || rows == 0 || heads == 0) return 0;
  const Hops hops(members, c.forward(), turn_round);
  const int64_t kv = hops.kv > 0 ? kv_copies(c, rows, rows, heads) : 0;
  const int64_t d_kv = hops.d_kv > 0 ? hop_copies(c, rows, rows, heads) : 0;
  const bool travel_together = hops.messages < hops.kv + hops.d_kv;
  return travel_together ? kv + d_kv : std::max(kv, d_kv);
}

ClosedForm ring_form(const FormContext& c, int members, int64_t rows, int64_t heads,
                     bool turn_round, bool sees_other) {
  ClosedForm form;
  const int64_t n = members;
  if (n == 1 || rows == 0 || heads == 0) return form;
  const int64_t block = stored(c, ArrayKind::kv, rows, heads);
  // At most two storages hold received blocks; a block kept from forward counts if it is used.
  const int64_t held =
      n == 2 && !c.forward() && turn_round && !sees_other ? 0 : std::min(n - 1, int64_t{2});
  form.transient_bytes = held * block + ring_copies(c, members, rows, heads, turn_round);
  if (!c.forward()) {
    const int64_t sums = turn_round ? std::min(n - 1, int64_t{2}) : 2;
    form.transient_bytes += sums * stored(c, ArrayKind::d_kv, rows, heads);
  }
  const Hops hops(n, c.forward(), turn_round);
  form.messages = hops.messages;
  form.bytes_sent = form.bytes_received = hops.kv * wire(c, ArrayKind::kv, rows, heads) +
                                          hops.d_kv * wire(c, ArrayKind::d_kv, rows, heads);
  return form;
}

ClosedForm flat_ring_form(const FormContext& c, bool turn_round) {
  const bool sees = c.problem.cp() == 2 && needed(c, c.rank, 1 - c.rank) > 0;
  ClosedForm form =
      ring_form(c, c.problem.cp(), c.slots(ArrayKind::kv), c.kv_heads(), turn_round, sees);
  form.pairs = own_pairs(c);
  if (c.forward() && merges_at_end(c.problem))
    for (const ArrayKind kind : {ArrayKind::out, ArrayKind::stats})
      form.transient_bytes +=
          (c.problem.cp() - 1) * stored(c, kind, c.slots(kind), c.problem.heads.heads);
  return form;
}

}  // namespace gyre
