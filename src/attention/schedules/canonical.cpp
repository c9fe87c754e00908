// Attention with bit-identical results for every number of ranks and every layout.
//
// Floating-point sums depend on their order. Here every sum of one row runs over the tokens of its
// document from first to last, in tiles counted from the beginning of the document:
//
//     forward     gather KV of all ranks in stream order
//                 own queries x all keys                         out, log-sum-exp
//     backward    gather KV; gather q, d_out and the statistics in stream order
//                 own queries x all keys                         d_q
//                 all queries x own keys                         d_kv
//                 sinks from the statistics of all rows
//
// A gathered array holds real tokens only, sorted by document and position, so that a document is
// one run under any layout: a query and the keys of its document form one rectangle, as do a key
// and its queries. Nothing is summed over ranks.
//
// Example, cp = 2, dual-chunk-swap, documents abcd and xy in 4 slots: rank 0 has a d x, rank 1
// b c y; both gather abcdxy.
//
// Cost compared with all-gather: 7 products backward instead of 5 (scores and <dO, v> twice), q,
// d_out and statistics are gathered as well, and no transfer of forward is hidden. A layout in
// stripes of one slot sends every row as its own slice. It is for checks, not for speed.

#include <algorithm>
#include <tuple>

#include "attention/schedules/builder/forms.hpp"
#include "attention/schedules/builder/plan_builder.hpp"
#include "attention/schedules/list.hpp"

namespace gyre {
namespace {

/// All real tokens of all ranks, sorted by document and position; adjacent rows are one run.
std::vector<RankRows> stream_order(const Layout& layout) {
  struct Place {
    int64_t segment;
    DocPosition position;
    RankRows run;
  };
  std::vector<Place> places;
  for (int r = 0; r < layout.cp(); ++r)
    for (const Fragment& f : layout.shard(r).fragments) {
      const int64_t run = f.stride == 1 ? f.length : 1;
      for (int64_t i = 0; i < f.length; i += run)
        places.push_back({f.segment, f.start + i * f.stride, {r, f.local_begin + i, run}});
    }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return std::tie(a.segment, a.position) < std::tie(b.segment, b.position);
  });
  std::vector<RankRows> rows;
  for (const Place& place : places) append(rows, place.run);
  return rows;
}

/// Gathers own rows of some kinds into new arrays, in stream order.
class StreamGather {
 public:
  explicit StreamGather(PlanBuilder& plan) : plan_(plan), sends_(plan.cp()), recvs_(sends_) {
    for (int r = 0; r < plan.cp(); ++r) sends_[r].peer = recvs_[r].peer = r;
  }
  /// `rows`: all rows of the kind, in stream order.
  int add(ArrayKind kind, const std::vector<RankRows>& rows, int storage) {
    const int array = plan_.add_array(kind, rows, plan_.all_heads(kind), storage);
    std::vector<RankRows> own_runs;
    for (const RankRows& run : rows)
      if (run.rank == plan_.rank()) own_runs.push_back(run);
    for (Message& m : sends_)
      for (const Slice& slice : plan_.slices_of(kind, own_runs)) m.slices.push_back(slice);
    const std::vector<Slice> slices = plan_.slices_of(array);
    for (size_t i = 0; i < rows.size(); ++i) recvs_[rows[i].rank].slices.push_back(slices[i]);
    return array;
  }
  int start(const char* what) { return plan_.exchange(what, std::move(sends_), std::move(recvs_)); }

 private:
  PlanBuilder& plan_;
  std::vector<Message> sends_, recvs_;  // [cp]
};

class Canonical {
 public:
  explicit Canonical(PlanBuilder& plan)
      : plan_(plan),
        queries_(stream_order(plan.problem().layout_of(ArrayKind::q))),
        keys_(stream_order(plan.problem().layout_of(ArrayKind::kv))),
        kv_storage_(plan.new_storage()) {}

  void forward() {
    plan_.clear(set_.out);
    plan_.clear(set_.stats);
    step::Compute attend = step_of(set_, gather_kv());
    attend.out = set_.out;
    plan_.compute(std::move(attend), Trim::nothing);
    plan_.finish(set_);
  }

  void backward() {
    plan_.delta(set_);
    plan_.clear(set_.d_q);
    plan_.clear(set_.d_kv);
    StreamGather keys(plan_), rest(plan_);
    const int kv = keys.add(ArrayKind::kv, keys_, kv_storage_);
    const int kv_id = keys.start("KV in stream order");
    ArraySet all;
    all.q = rest.add(ArrayKind::q, queries_, -1);
    all.d_out = rest.add(ArrayKind::d_out, queries_, -1);
    all.stats = rest.add(ArrayKind::stats, queries_, -1);
    const int rest_id = rest.start("Q, dO and statistics in stream order");
    plan_.wait(kv_id);
    step::Compute of_queries = step_of(set_, kv);
    of_queries.d_out = set_.d_out;
    of_queries.d_q = set_.d_q;
    plan_.compute(std::move(of_queries), Trim::nothing);
    plan_.wait(rest_id);
    step::Compute of_keys = step_of(all, set_.kv);
    of_keys.d_out = all.d_out;
    of_keys.d_kv = set_.d_kv;
    plan_.compute(std::move(of_keys), Trim::nothing);
    plan_.sink_gradient(all.stats, true);
  }

 private:
  int gather_kv() {
    StreamGather gather(plan_);
    const int kv = gather.add(ArrayKind::kv, keys_, kv_storage_);
    plan_.wait(gather.start("KV in stream order"));
    return kv;
  }
  step::Compute step_of(const ArraySet& queries, int kv) const {
    step::Compute step;
    step.q = queries.q;
    step.stats = queries.stats;
    step.kv = kv;
    step.kv_heads = plan_.all_heads(ArrayKind::kv);
    step.fixed_tiles = true;
    return step;
  }

  PlanBuilder& plan_;
  ArraySet set_;
  std::vector<RankRows> queries_, keys_;  // of all ranks
  int kv_storage_;
};

/// Counts real tokens only: `own` on this rank, `all` on all ranks. Arrays that are gathered
/// together have the same rows.
ClosedForm closed_form(const FormContext& c) {
  ClosedForm form;
  form.pairs = own_pairs(c);
  const int64_t others = c.problem.cp() - 1;
  const auto gather = [&](std::initializer_list<ArrayKind> kinds) {
    int64_t own = 0, all = 0;
    for (int r = 0; r < c.problem.cp(); ++r)
      for (const Fragment& f : c.problem.layout_of(*kinds.begin()).shard(r).fragments) {
        all += f.length;
        own += r == c.rank ? f.length : 0;
      }
    form.messages += own > 0 ? others : 0;
    for (const ArrayKind kind : kinds) {
      const int64_t heads = has_keys(kind) ? c.kv_heads() : c.problem.heads.heads;
      form.bytes_sent += others * wire(c, kind, own, heads);
      form.bytes_received += wire(c, kind, all - own, heads);
      form.transient_bytes += stored(c, kind, all, heads);
      if (has_keys(kind)) form.transient_bytes += kv_copies(c, others * own, all - own, heads);
    }
  };
  gather({ArrayKind::kv});
  if (!c.forward()) gather({ArrayKind::q, ArrayKind::d_out, ArrayKind::stats});
  return form;
}

}  // namespace

Schedule canonical_schedule() {
  return {.name = "canonical",
          .summary = "the same bits for every cp and layout; for checks, not for speed",
          .plan = plan_both_passes<Canonical>,
          .closed_form = closed_form,
          .competes = false};
}

}  // namespace gyre
