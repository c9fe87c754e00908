// Queries of all ranks meet the keys where they are, and partial results go home: what serving
// calls decode context parallelism (vLLM's --decode-context-parallel-size), and what ring-query
// does in steps. It moves no keys, so that a few queries over long contexts cost little.
//
//     start sending own queries to all, receiving theirs
//     attend own queries to own keys
//     wait; attend the others' queries to own keys: partial results
//     send each rank its partial results, receive own ones; merge them all at once
//
// Backward sends, beside the queries, the gradients of their outputs and their statistics. Terms of
// d_q go home and are added there. The gradients of own keys have all their terms here.
//
//     bytes a rank sends, n-1 times     all-gather-query                   all-gather
//     forward                           q + out + statistics               kv
//     backward                          q + d_out + statistics + d_q       kv + d_kv
//
// A rank without a visible key sends out = 0 with a log-sum-exp of -inf, which a merge leaves out.
//
// Example, cp = 3, decoding one document of 6 tokens with a stripe of 1: its only query is on rank
// 0. Ranks 1 and 2 receive it, attend it to their two keys each, and return two partial results.

#include <vector>

#include "attention/schedules/builder/forms.hpp"
#include "attention/schedules/builder/plan_builder.hpp"
#include "attention/schedules/list.hpp"

namespace gyre {
namespace {

class AllGatherQuery {
 public:
  explicit AllGatherQuery(PlanBuilder& plan) : plan_(plan) {
    int64_t row = 0;
    for (int r = 0; r < plan.cp(); ++r) {
      const RankRows rows = plan.rows_of(r, ArrayKind::q).front();
      blocks_.push_back({row, r == plan.rank() ? 0 : rows.length});
      row += blocks_.back().length;
      if (r != plan.rank()) others_.push_back(rows);
    }
  }

  void forward() {
    plan_.clear(own_.out);
    plan_.clear(own_.stats);
    ArraySet all;
    const int gather = start_gather({{ArrayKind::q, &ArraySet::q}}, "all-gather Q", all);
    plan_.compute(own_, own_.kv);
    plan_.wait(gather);
    if (plan_.cp() > 1) attend_others(all);
    plan_.finish(own_);
  }

  void backward() {
    plan_.delta(own_);
    plan_.clear(own_.d_q);
    plan_.clear(own_.d_kv);
    ArraySet all;
    const int gather = start_gather({{ArrayKind::q, &ArraySet::q},
                                     {ArrayKind::d_out, &ArraySet::d_out},
                                     {ArrayKind::stats, &ArraySet::stats}},
                                    "all-gather Q and dO", all);
    plan_.compute(own_, own_.kv, own_.d_kv);
    plan_.wait(gather);
    if (plan_.cp() > 1) {
      all.d_q = array_of_others(ArrayKind::d_q);
      plan_.clear(all.d_q);
      plan_.compute(all, own_.kv, own_.d_kv);
      plan_.wait(return_home("reduce-scatter dQ", {all.d_q},
                             [&] { return std::vector<Slice>{plan_.whole(own_.d_q, true)}; }));
    }
    plan_.sink_gradient(own_.stats);
  }

 private:
  struct Gathered {
    ArrayKind kind;
    int ArraySet::*array;
  };

  int array_of_others(ArrayKind kind) {
    return plan_.add_array(kind, others_, plan_.all_heads(kind));
  }
  Slice block_of(int array, int rank) const {
    const RowRange& rows = blocks_[plan_.wrap(rank)];
    return {array, rows.begin, rows.length, plan_.array(array).heads};
  }
  /// Starts gathering own arrays of all ranks into new ones, which `all` gets.
  int start_gather(const std::vector<Gathered>& kinds, const char* what, ArraySet& all) {
    std::vector<Message> sends, recvs;
    for (int i = 1; i < plan_.cp(); ++i) {
      sends.push_back({plan_.wrap(plan_.rank() + i), {}});
      recvs.push_back({plan_.wrap(plan_.rank() - i), {}});
    }
    for (const Gathered& kind : kinds) {
      if (plan_.cp() > 1) all.*kind.array = array_of_others(kind.kind);
      for (Message& m : sends) m.slices.push_back(plan_.whole(own(kind.kind)));
      for (Message& m : recvs) m.slices.push_back(block_of(all.*kind.array, m.peer));
    }
    return plan_.exchange(what, std::move(sends), std::move(recvs));
  }
  /// Sends each rank its rows of `arrays`. Receives from each rank into received().
  template <class Received>
  int return_home(const char* what, const std::vector<int>& arrays, const Received& received) {
    std::vector<Message> sends, recvs;
    for (int i = 1; i < plan_.cp(); ++i) {
      Message& message = sends.emplace_back(Message{plan_.wrap(plan_.rank() + i), {}});
      for (const int array : arrays) message.slices.push_back(block_of(array, message.peer));
      recvs.push_back({plan_.wrap(plan_.rank() - i), received()});
    }
    return plan_.exchange(what, std::move(sends), std::move(recvs));
  }
  /// Attends the queries of other ranks, and merges what they return.
  void attend_others(ArraySet& all) {
    all.out = array_of_others(ArrayKind::out);
    all.stats = array_of_others(ArrayKind::stats);
    plan_.clear(all.out);
    plan_.clear(all.stats);
    plan_.compute(all, own_.kv);
    step::Merge merge{own_.out, own_.stats, {}};
    const auto own_rows = [&](ArrayKind kind) {
      return plan_.add_array(kind, plan_.rows_of(plan_.rank(), kind), plan_.all_heads(kind));
    };
    const int id = return_home("partial results", {all.out, all.stats}, [&] {
      merge.partials.push_back({own_rows(ArrayKind::out), own_rows(ArrayKind::stats)});
      return std::vector{plan_.whole(merge.partials.back().out),
                         plan_.whole(merge.partials.back().stats)};
    });
    plan_.wait(id);
    plan_.add(std::move(merge));
  }

  PlanBuilder& plan_;
  ArraySet own_;
  std::vector<RankRows> others_;  // rows of queries of the other ranks, in rank order
  std::vector<RowRange> blocks_;  // [cp] those of each rank, none of this one
};

ClosedForm closed_form(const FormContext& c) {
  ClosedForm form;
  const int64_t others = c.problem.cp() - 1, rows = c.slots(ArrayKind::q);
  const int64_t heads = c.problem.heads.heads;
  if (others == 0 || rows == 0) return form;
  form.messages = 2 * others;
  // Arrays of the others' rows, for each of which rows go out and rows come in.
  const auto moves = [&](ArrayKind kind, int64_t arrays) {
    form.bytes_sent += others * wire(c, kind, rows, heads);
    form.transient_bytes += arrays * stored(c, kind, others * rows, heads);
  };
  moves(ArrayKind::q, 1);
  if (c.forward()) {
    moves(ArrayKind::out, 2);
    moves(ArrayKind::stats, 2);
    form.transient_bytes += 2 * others * copy(c, ArrayKind::out, rows, heads, heads);
  } else {
    moves(ArrayKind::d_out, 1);
    moves(ArrayKind::stats, 1);
    moves(ArrayKind::d_q, 1);
    form.transient_bytes += others * (copy(c, ArrayKind::d_q, rows, heads, heads) +
                                      wire(c, ArrayKind::d_q, rows, heads));
  }
  form.bytes_received = form.bytes_sent;
  return form;
}

}  // namespace

Schedule all_gather_query_schedule() {
  return {.name = "all-gather-query",
          .summary = "queries go to all keys, partial results come back (decode context parallel)",
          .plan = plan_both_passes<AllGatherQuery>,
          .closed_form = closed_form};
}

}  // namespace gyre
