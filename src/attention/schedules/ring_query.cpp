// Queries travel round the ring, keys and values stay (pass-Q; Yang et al., arXiv 2411.01783,
// algorithm 3; here backward as well, and results go home as soon as they are there).
//
// Rank r of n computes at step i the attention of rank r-i's queries to its own keys, a partial
// result, which it returns:
//
//     for i in 0 .. n-1:
//         if i < n-1: start sending the current queries to r+1 and receiving the next from r-1
//         attend the current queries to own keys; step 0 writes the rank's own result
//         if i > 0:   start returning the partial result to r-i and receiving one from r+i
//         if i > 1:   wait for what step i-1 returned; merge the partial result that came
//         if i < n-1: wait for the next queries
//     wait; merge the last partial result
//
// Backward sends, beside the queries, the gradients of their outputs and their statistics. Terms of
// d_q go home and are added there. The gradients of own keys have all their terms here.
//
//     bytes a rank sends, n-1 times     ring-query                         ring
//     forward                           q + out + statistics               kv
//     backward                          q + d_out + statistics + d_q       kv + d_kv
//
// Example, cp = 3, rank 0: attends the queries of ranks 0, 2 and 1 to its keys; returns a result to
// rank 2 while it attends those of rank 1, and gets one from rank 1.

#include <algorithm>
#include <array>

#include "attention/schedules/builder/forms.hpp"
#include "attention/schedules/builder/plan_builder.hpp"
#include "attention/schedules/list.hpp"

namespace gyre {
namespace {

class RingQuery {
 public:
  explicit RingQuery(PlanBuilder& plan) : plan_(plan) {
    for (auto& pair : storages_) pair = {plan.new_storage(), plan.new_storage()};
  }

  void forward() {
    plan_.clear(own_.out);
    plan_.clear(own_.stats);
    ArraySet held = own_, partial;
    int back = -1;
    for (int i = 0; i < plan_.cp(); ++i) {
      ArraySet next;
      const int hop = start_hop({ArrayKind::q}, i, held, next);
      if (i > 0) {
        add_arrays({ArrayKind::out, ArrayKind::stats}, plan_.rank() - i, i, sent_results, held);
        plan_.clear(held.out);
        plan_.clear(held.stats);
      }
      plan_.compute(held, own_.kv);
      ArraySet received;
      const int returned = i == 0 ? -1 : return_result(i, held, received);
      if (i > 1) merge(back, partial);
      back = returned;
      partial = received;
      plan_.wait(hop);
      held = next;
    }
    if (plan_.cp() > 1) merge(back, partial);
    plan_.finish(own_);
  }

  void backward() {
    plan_.delta(own_);
    plan_.clear(own_.d_q);
    plan_.clear(own_.d_kv);
    ArraySet held = own_;
    int back = -1;
    for (int i = 0; i < plan_.cp(); ++i) {
      ArraySet next;
      const int hop = start_hop({ArrayKind::q, ArrayKind::d_out, ArrayKind::stats}, i, held, next);
      if (i > 0) {
        add_arrays({ArrayKind::d_q}, plan_.rank() - i, i, sent_results, held);
        plan_.clear(held.d_q);
      }
      plan_.compute(held, own_.kv, own_.d_kv);
      const int returned = i == 0 ? -1 : return_gradient(i, held);
      plan_.wait(back);
      back = returned;
      plan_.wait(hop);
      held = next;
    }
    plan_.wait(back);
    plan_.sink_gradient(own_.stats);
  }

 private:
  using Kinds = std::initializer_list<ArrayKind>;
  /// Uses of storages: each array of a kind has two storages for each use, which take turns.
  enum Use { queries, sent_results, received_results, uses };

  static int& member(ArraySet& set, ArrayKind kind) {
    switch (kind) {
      case ArrayKind::q:
        return set.q;
      case ArrayKind::out:
        return set.out;
      case ArrayKind::stats:
        return set.stats;
      case ArrayKind::d_out:
        return set.d_out;
      default:
        return set.d_q;
    }
  }
  /// Adds arrays of these kinds for the rows of `owner` to a set.
  void add_arrays(Kinds kinds, int owner, int turn, Use use, ArraySet& set) {
    for (const ArrayKind kind : kinds) {
      const size_t pair = use * array_kinds + static_cast<size_t>(kind);
      member(set, kind) = plan_.add_array(kind, plan_.rows_of(plan_.wrap(owner), kind),
                                          plan_.all_heads(kind), storages_.at(pair).at(turn % 2));
    }
  }
  std::vector<Slice> slices(Kinds kinds, ArraySet& set) const {
    std::vector<Slice> all;
    for (const ArrayKind kind : kinds) all.push_back(plan_.whole(member(set, kind)));
    return all;
  }
  /// Step i's transfer of queries; `next` gets what arrives. -1 in the last step.
  int start_hop(Kinds kinds, int i, ArraySet& held, ArraySet& next) {
    if (i + 1 == plan_.cp()) return -1;
    add_arrays(kinds, plan_.rank() - i - 1, i, queries, next);
    return plan_.exchange_pair("queries", {plan_.wrap(plan_.rank() + 1), slices(kinds, held)},
                               {plan_.wrap(plan_.rank() - 1), slices(kinds, next)});
  }
  int return_result(int i, ArraySet& held, ArraySet& received) {
    const Kinds kinds = {ArrayKind::out, ArrayKind::stats};
    add_arrays(kinds, plan_.rank(), i, received_results, received);
    return plan_.exchange_pair("partial results",
                               {plan_.wrap(plan_.rank() - i), slices(kinds, held)},
                               {plan_.wrap(plan_.rank() + i), slices(kinds, received)});
  }
  int return_gradient(int i, const ArraySet& held) {
    return plan_.exchange_pair("terms of dQ",
                               {plan_.wrap(plan_.rank() - i), {plan_.whole(held.d_q)}},
                               {plan_.wrap(plan_.rank() + i), {plan_.whole(own_.d_q, true)}});
  }
  void merge(int exchange, const ArraySet& partial) {
    plan_.wait(exchange);
    plan_.add(step::Merge{own_.out, own_.stats, {{partial.out, partial.stats}}});
  }

  PlanBuilder& plan_;
  ArraySet own_;
  std::array<std::array<int, 2>, size_t{uses} * array_kinds> storages_{};
};

ClosedForm closed_form(const FormContext& c) {
  ClosedForm form;
  const int64_t others = c.problem.cp() - 1, rows = c.slots(ArrayKind::q),
                heads = c.problem.heads.heads;
  if (others == 0 || rows == 0) return form;
  const int64_t two = std::min<int64_t>(2, others);  // storages, and returns under way
  const auto hop = [&](ArrayKind kind) {
    form.bytes_sent += others * wire(c, kind, rows, heads);
    form.transient_bytes += two * stored(c, kind, rows, heads);
  };
  const auto give_back = [&](ArrayKind kind, bool adds) {
    const int64_t sent = copy(c, kind, rows, heads, heads), bytes = wire(c, kind, rows, heads);
    form.bytes_sent += others * bytes;
    form.transient_bytes +=
        two * (adds ? 1 : 2) * stored(c, kind, rows, heads) + two * (sent + (adds ? bytes : sent));
  };
  form.messages = 2 * others;
  hop(ArrayKind::q);
  if (c.forward()) {
    give_back(ArrayKind::out, false);
    give_back(ArrayKind::stats, false);
  } else {
    hop(ArrayKind::d_out);
    hop(ArrayKind::stats);
    give_back(ArrayKind::d_q, true);
  }
  form.bytes_received = form.bytes_sent;
  return form;
}

}  // namespace

Schedule ring_query_schedule() {
  return {.name = "ring-query",
          .summary = "queries travel round the ring; partial results and terms of dQ go home",
          .plan = plan_both_passes<RingQuery>,
          .closed_form = closed_form};
}

}  // namespace gyre
