// Attention that sends keys only where they are used (MagiAttention's group-cast and group-reduce,
// https://github.com/SandAI-org/MagiAttention): a rank receives only the keys and values that its
// queries see.
//
// Forward has one stage per distance: at stage i rank r sends to r+i and receives from r-i.
//
//     start stage 1; attend own queries to own keys
//     for i in 1 .. cp-1:
//         wait for stage i; start the next stage
//         attend own queries to the rows received from r-i
//
// A stage in which this rank neither sends nor receives rows costs nothing: the next nonempty stage
// starts in its place. Two storages suffice for received rows.
//
// Backward receives the same rows again: keeping them would take the memory of all stages at once,
// which the ring avoids. Their gradients are returned one stage later and added to the owner's in
// order of distance, after its own terms:
//
//     start stage 1; gradient of own keys, into d_kv
//     for i in 1 .. cp-1:
//         wait for stage i; start stage i+1
//         gradient of the rows received from r-i
//         wait for the gradients of stage i-1; start sending those of stage i to r-i
//
// Here empty stages are not skipped: every rank keeps the order KV 1, KV 2, dKV 1, KV 3, dKV 2,
// ..., so that transfers which a device executes in sequence cannot deadlock in a cycle.
//
// Example, one causal document, cp = 3: under contiguous, rank 0 receives nothing, rank 1 all rows
// of rank 0, rank 2 all rows of ranks 1 and 0: half of a ring's bytes. Under dual-chunk-swap a rank
// needs the first half of the rows of lower ranks and all rows of higher ranks: 3/4.

#include <algorithm>
#include <array>

#include "attention/schedules/builder/forms.hpp"
#include "attention/schedules/builder/plan_builder.hpp"
#include "attention/schedules/list.hpp"

namespace gyre {
namespace {

class GroupCast {
 public:
  explicit GroupCast(PlanBuilder& plan) : plan_(plan), stages_(plan.cp()), kv_(stages_.size(), -1) {
    const int cp = plan.cp();
    for (int i = 1; i < cp; ++i) {
      Stage& stage = stages_[i];
      stage.to = (plan.rank() + i) % cp;
      stage.from = (plan.rank() - i + cp) % cp;
      stage.sent = needed_rows(plan.problem(), stage.to, plan.rank());
      stage.received = needed_rows(plan.problem(), plan.rank(), stage.from);
    }
    for (auto* storages : {&kv_storages_, &d_kv_storages_})
      *storages = {plan.new_storage(), plan.new_storage()};
  }

  void forward() {
    plan_.clear(set_.out);
    plan_.clear(set_.stats);
    received_ = 0;
    size_t next = busy_from(1);
    int id = start(next);
    plan_.compute(set_, set_.kv);
    while (next < stages_.size()) {
      const size_t stage = next;
      next = busy_from(stage + 1);
      plan_.wait(id);
      id = start(next);
      if (receives(stage)) plan_.compute(set_, kv_[stage]);
    }
    plan_.finish(set_);
  }

  void backward() {
    plan_.delta(set_);
    plan_.clear(set_.d_q);
    plan_.clear(set_.d_kv);
    received_ = 0;
    int id = start(1), gradients = -1;
    plan_.compute(set_, set_.kv, set_.d_kv);
    for (size_t i = 1; i < stages_.size(); ++i) {
      plan_.wait(id);
      id = start(i + 1);
      int d_kv = -1;
      if (receives(i)) {
        const PlanArray& kv = plan_.array(kv_[i]);
        const bool first = kv.storage == kv_storages_[0];
        d_kv =
            plan_.add_array(ArrayKind::d_kv, kv.rows, kv.heads, d_kv_storages_.at(first ? 0 : 1));
        plan_.clear(d_kv);
        plan_.compute(set_, kv_[i], d_kv);
      }
      plan_.wait(gradients);
      gradients = send_back(i, d_kv);
    }
    plan_.wait(gradients);
    plan_.sink_gradient(set_.stats);
  }

 private:
  struct Stage {
    int to = 0, from = 0;
    std::vector<RankRows> sent, received;
  };

  bool receives(size_t i) const { return !stages_[i].received.empty(); }
  /// First stage from `i` on that sends or receives; stages_.size() if there is none.
  size_t busy_from(size_t i) const {
    while (i < stages_.size() && !receives(i) && stages_[i].sent.empty()) ++i;
    return i;
  }

  /// Starts a stage, if there is one. Returns the id to wait for.
  int start(size_t i) {
    if (i >= stages_.size()) return -1;
    const Stage& stage = stages_[i];
    std::vector<Message> recvs;
    if (receives(i)) {
      kv_[i] = plan_.add_array(ArrayKind::kv, stage.received, plan_.all_heads(ArrayKind::kv),
                               kv_storages_.at(received_++ % 2));
      recvs.push_back({stage.from, plan_.slices_of(kv_[i])});
    }
    return plan_.exchange("KV", {{stage.to, plan_.slices_of(ArrayKind::kv, stage.sent)}},
                          std::move(recvs));
  }

  /// Sends the gradients of a stage's rows to their owner. Returns the id to wait for.
  int send_back(size_t i, int d_kv) {
    std::vector<Message> sends;
    if (d_kv >= 0) sends.push_back({stages_[i].from, plan_.slices_of(d_kv)});
    return plan_.exchange(
        "dKV", std::move(sends),
        {{stages_[i].to, plan_.slices_of(ArrayKind::d_kv, stages_[i].sent, true)}});
  }

  PlanBuilder& plan_;
  ArraySet set_;
  std::vector<Stage> stages_;  // [cp]; [0] is empty
  std::vector<int> kv_;        // [cp] arrays of received rows
  std::array<int, 2> kv_storages_{}, d_kv_storages_{};
  size_t received_ = 0;  // number of stages with rows received so far
};

/// A rank sends a ring's bytes times the share of its rows that other ranks see.
ClosedForm closed_form(const FormContext& c) {
  ClosedForm form;
  form.pairs = own_pairs(c);
  const int cp = c.problem.cp();
  int64_t largest[2] = {0, 0};  // rows in each of the two alternating storages
  int64_t turn = 0;
  std::vector<int64_t> cast(cp + 1, 0), back(cp + 1, 0);  // bytes of copies of each stage
  for (int i = 1; i < cp; ++i) {
    const int to = (c.rank + i) % cp, from = (c.rank - i + cp) % cp;
    const int64_t sent = needed(c, to, c.rank), received = needed(c, c.rank, from);
    form.messages += sent > 0 ? 1 : 0;
    form.bytes_sent += wire(c, ArrayKind::kv, sent, c.kv_heads());
    form.bytes_received += wire(c, ArrayKind::kv, received, c.kv_heads());
    if (received > 0) {
      int64_t& rows = largest[turn++ % 2];
      rows = std::max(rows, received);
    }
    cast[i] = kv_copies(c, sent, received, c.kv_heads());
    if (c.forward()) continue;
    form.messages += received > 0 ? 1 : 0;
    form.bytes_sent += wire(c, ArrayKind::d_kv, received, c.kv_heads());
    form.bytes_received += wire(c, ArrayKind::d_kv, sent, c.kv_heads());
    back[i] = hop_copies(c, received, sent, c.kv_heads());
  }
  for (const int64_t rows : largest) {
    form.transient_bytes += stored(c, ArrayKind::kv, rows, c.kv_heads());
    if (!c.forward()) form.transient_bytes += stored(c, ArrayKind::d_kv, rows, c.kv_heads());
  }
  // Backward, the keys of stage i travel with the gradients of stage i - 2, then of stage i - 1.
  int64_t copies = 0;
  for (int i = 1; i <= cp; ++i)
    copies = std::max(copies, cast[i] + std::max(back[i - 1], i > 1 ? back[i - 2] : 0));
  form.transient_bytes += copies;
  return form;
}

}  // namespace

Schedule group_cast_schedule() {
  return {.name = "group-cast",
          .summary = "each rank receives only the KV rows that its queries see",
          .plan = plan_both_passes<GroupCast>,
          .closed_form = closed_form};
}

}  // namespace gyre
