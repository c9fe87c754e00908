#include "attention/schedules/builder/gather.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "attention/schedules/builder/forms.hpp"
#include "attention/schedules/builder/plan_builder.hpp"

namespace gyre {
namespace {

class Gather {
 public:
  Gather(PlanBuilder& plan, std::vector<HeadRange> stages)
      : plan_(plan), stages_(std::move(stages)), kv_(stages_.size(), -1) {
    if (plan.cp() == 1) stages_.clear();  // nothing to gather
    int64_t row = 0;
    for (int r = 0; r < plan.cp(); ++r) {
      const bool here = library() || r != plan.rank();
      block_.push_back({row, here ? tokens_of(r) : 0});
      if (here) rows_.push_back(plan.rows_of(r, ArrayKind::kv).front());
      row += block_.back().length;
      ranks_.push_back(r);
    }
    const RowRange own = block(plan.rank());
    others_ = {{0, own.begin}, {own.begin + own.length, row - own.begin - own.length}};
    for (auto* storages : {&kv_storages_, &d_kv_storages_}) {
      storages->at(0) = plan.new_storage();
      storages->at(1) = stages_.size() > 1 ? plan.new_storage() : storages->at(0);
    }
  }

  void forward() {
    plan_.clear(set_.out);
    plan_.clear(set_.stats);
    int gather = start(0);
    plan_.compute(set_, set_.kv);
    for (size_t g = 0; g < stages_.size(); ++g) {
      plan_.wait(gather);
      gather = start(g + 1);
      plan_.compute(set_, kv_[g], -1, others_);
    }
    plan_.finish(set_);
  }

  void backward() {
    plan_.delta(set_);
    plan_.clear(set_.d_q);
    plan_.clear(set_.d_kv);
    int gather = start(0), hop = -1;
    plan_.compute(set_, set_.kv, set_.d_kv);
    for (size_t g = 0; g < stages_.size(); ++g) {
      plan_.wait(gather);
      gather = start(g + 1);
      const int d_kv =
          plan_.add_array(ArrayKind::d_kv, rows_, stages_[g], d_kv_storages_.at(g % 2));
      plan_.clear(d_kv);
      if (library()) {
        plan_.compute(set_, kv_[g], d_kv, others_);
        plan_.wait(hop);
        hop = reduce_scatter(d_kv);
        continue;
      }
      for (int s = 0; s + 1 < plan_.cp(); ++s) {
        plan_.compute(set_, kv_[g], d_kv, {block(plan_.rank() - 1 - s)});
        plan_.wait(hop);
        hop = start_hop(d_kv, s);
      }
    }
    plan_.wait(hop);
    plan_.sink_gradient(set_.stats);
  }

 private:
  bool library() const { return by_library(plan_.problem()); }
  int64_t tokens_of(int rank) const { return plan_.rows_of(rank, ArrayKind::kv).front().length; }
  /// The rows of a rank in the gathered arrays.
  RowRange block(int rank) const { return block_[plan_.wrap(rank)]; }

  /// Starts the gather of a stage, if there is one. Returns the id to wait for.
  int start(size_t stage) {
    if (stage >= stages_.size()) return -1;
    const HeadRange heads = stages_[stage];
    const int kv = plan_.add_array(ArrayKind::kv, rows_, heads, kv_storages_.at(stage % 2));
    kv_[stage] = kv;
    std::vector<Message> sends, recvs;
    for (int i = 1; i < plan_.cp(); ++i) {
      const int to = plan_.wrap(plan_.rank() + i), from = plan_.wrap(plan_.rank() - i);
      sends.push_back({to, {{set_.kv, 0, tokens_of(plan_.rank()), heads}}});
      recvs.push_back({from, {{kv, block(from).begin, block(from).length, heads}}});
    }
    return plan_.exchange("all-gather KV", std::move(sends), std::move(recvs),
                          library() ? Transport::all_gather : Transport::messages, ranks_);
  }
  /// Starts the library's reduce-scatter.
  int reduce_scatter(int d_kv) {
    const HeadRange heads = plan_.array(d_kv).heads;
    std::vector<Message> sends, recvs;
    for (const int r : ranks_) {
      if (r == plan_.rank()) continue;
      sends.push_back({r, {{d_kv, block(r).begin, block(r).length, heads}}});
      recvs.push_back({r, {{set_.d_kv, 0, tokens_of(plan_.rank()), heads, true}}});
    }
    return plan_.exchange("reduce-scatter dKV", std::move(sends), std::move(recvs),
                          Transport::reduce_scatter, ranks_);
  }

  int start_hop(int d_kv, int s) {
    const HeadRange heads = plan_.array(d_kv).heads;
    const RowRange sent = block(plan_.rank() - 1 - s), added = block(plan_.rank() - 2 - s);
    const Slice from = {d_kv, sent.begin, sent.length, heads};
    Slice to = {d_kv, added.begin, added.length, heads, true};
    if (s + 2 == plan_.cp()) to = {set_.d_kv, 0, tokens_of(plan_.rank()), heads, true};
    return plan_.exchange("reduce-scatter dKV", {{plan_.wrap(plan_.rank() + 1), {from}}},
                          {{plan_.wrap(plan_.rank() - 1), {to}}});
  }

  PlanBuilder& plan_;
  ArraySet set_;
  std::vector<HeadRange> stages_;
  std::vector<int> ranks_;        // all ranks
  std::vector<RankRows> rows_;    // rows of other ranks (library: of all), in rank order
  std::vector<RowRange> block_;   // [cp] rows of each rank in the gathered array
  std::vector<RowRange> others_;  // [2] rows before and after the own ones
  std::array<int, 2> kv_storages_{}, d_kv_storages_{};
  std::vector<int> kv_;  // [stages] array of the gathered keys and values
};

}  // namespace

RankPlan gather_plan(const AttentionProblem& problem, int rank, std::vector<HeadRange> stages) {
  PlanBuilder plan(problem, rank);
  Gather gather(plan, std::move(stages));
  gather.forward();
  plan.begin(Pass::backward);
  gather.backward();
  return plan.take();
}

ClosedForm gather_form(const FormContext& c, const std::vector<HeadRange>& stages) {
  ClosedForm form;
  form.pairs = own_pairs(c);
  const bool library = by_library(c.problem);
  const int64_t slots = c.slots(ArrayKind::kv), others = c.problem.cp() - 1;
  const int64_t rows = (others + (library ? 1 : 0)) * slots;
  if (others == 0 || slots == 0) return form;
  int64_t hop = 0, max_copies = 0;  // bytes copied: by a hop of the previous stage; the peak
  for (size_t g = 0; g < stages.size(); ++g) {
    const int64_t heads = stages[g].count;
    form.messages += (library ? 1 : others) * (c.forward() ? 1 : 2);
    form.bytes_sent += others * wire(c, ArrayKind::kv, slots, heads);
    if (!c.forward()) form.bytes_sent += others * wire(c, ArrayKind::d_kv, slots, heads);
    if (g < 2) {  // later stages use the same storages
      form.transient_bytes += stored(c, ArrayKind::kv, rows, heads);
      if (!c.forward()) form.transient_bytes += stored(c, ArrayKind::d_kv, rows, heads);
    }
    // The gather of this stage overlaps with the hops of the previous stage.
    const int64_t gather =
        (library ? 1 : others) * copy(c, ArrayKind::kv, slots, heads, c.kv_heads()) +
        kv_copies(c, 0, rows, heads);
    max_copies = std::max(max_copies, gather + hop);
    hop = c.forward() ? 0 : hop_copies(c, library ? rows : slots, slots, heads);
    max_copies = std::max(max_copies, hop);
  }
  form.bytes_received = form.bytes_sent;
  form.transient_bytes += max_copies;
  return form;
}

}  // namespace gyre
