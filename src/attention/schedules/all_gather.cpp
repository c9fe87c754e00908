// All-gather attention (Llama 3, arXiv 2407.21783, section 3.3.2): every rank gets the keys and
// values of all others and attends its own queries to them.
//
// Forward:
//
//     start sending own KV to all others, receiving theirs
//     attend own queries to own keys
//     wait
//     attend own queries to the keys of all others
//
// What is received lies in rank order and stays there: rectangles point at each owner's rows.
//
// Backward gathers again (nothing is kept from forward), and brings the gradients home by a
// reduce-scatter round the ring. At hop s a rank sends, to r+1, its sum for the rows of rank
// r-1-s, and adds what comes from r-1 to its own terms for rank r-2-s; the last hop adds to its own
// rows. The terms of one rank's rows are computed while the sum for another's is under way:
//
//     start the gather; gradient of own keys, into d_kv; wait
//     for s in 0 .. cp-2:
//         gradient of the keys of rank r-1-s
//         if s > 0: wait for hop s-1
//         start hop s
//     wait for hop cp-2
//
// Example, cp = 3, rank 0: computes and sends the sum for rank 2 (hop 0); computes that for rank 1,
// adds what comes from rank 2, sends it on (hop 1), and adds to its own rows what rank 2 sends
// then: the terms of ranks 1 and 2.
//
// all-gather-strided does the same for a few KV heads at a time. The gather of stage g+1 is under
// way during the attention of stage g, and the last hop of stage g during stage g+1. Memory for two
// stages instead of all heads; cp-1 messages a stage instead of cp-1.

#include <algorithm>
#include <array>

#include "attention/schedules/builder.hpp"
#include "attention/schedules/registry.hpp"

namespace gyre {
namespace {

class Gather {
 public:
  Gather(PlanBuilder& plan, std::vector<HeadRange> stages)
      : plan_(plan), stages_(std::move(stages)), kv_(stages_.size(), -1) {
    if (plan.cp() == 1) stages_.clear();  // nothing to gather
    int64_t row = 0;
    for (int r = 0; r < plan.cp(); ++r) {
      const int64_t slots = r == plan.rank() ? 0 : tokens_of(r);
      block_.push_back({row, slots});
      if (r != plan.rank()) rows_.push_back(plan.rows_of(r).front());
      row += slots;
    }
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
      plan_.compute(set_, kv_[g]);
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
      for (int s = 0; s + 1 < plan_.cp(); ++s) {
        plan_.compute(set_, kv_[g], d_kv, block(plan_.rank() - 1 - s));
        plan_.wait(hop);
        hop = start_hop(d_kv, s);
      }
    }
    plan_.wait(hop);
    plan_.sink_gradient(set_.stats);
  }

 private:
  int wrap(int rank) const { return (rank % plan_.cp() + plan_.cp()) % plan_.cp(); }
  int64_t tokens_of(int rank) const { return plan_.rows_of(rank).front().length; }
  /// The rows of a rank in the gathered arrays.
  Rows block(int rank) const { return block_[static_cast<size_t>(wrap(rank))]; }

  /// Starts the gather of a stage, if there is one. Returns the id to wait for.
  int start(size_t stage) {
    if (stage >= stages_.size()) return -1;
    const HeadRange heads = stages_[stage];
    const int kv = plan_.add_array(ArrayKind::kv, rows_, heads, kv_storages_.at(stage % 2));
    kv_[stage] = kv;
    std::vector<Message> sends, recvs;
    for (int i = 1; i < plan_.cp(); ++i) {
      const int to = wrap(plan_.rank() + i), from = wrap(plan_.rank() - i);
      sends.push_back({to, {{set_.kv, 0, tokens_of(plan_.rank()), heads}}});
      recvs.push_back({from, {{kv, block(from).begin, block(from).length, heads}}});
    }
    return plan_.exchange("all-gather KV", std::move(sends), std::move(recvs));
  }

  /// Hop s of the reduce-scatter.
  int start_hop(int d_kv, int s) {
    const HeadRange heads = plan_.array(d_kv).heads;
    const Rows sent = block(plan_.rank() - 1 - s), added = block(plan_.rank() - 2 - s);
    const Slice from = {d_kv, sent.begin, sent.length, heads};
    Slice to = {d_kv, added.begin, added.length, heads, true};
    if (s + 2 == plan_.cp()) to = {set_.d_kv, 0, tokens_of(plan_.rank()), heads, true};
    return plan_.exchange("reduce-scatter dKV", {{wrap(plan_.rank() + 1), {from}}},
                          {{wrap(plan_.rank() - 1), {to}}});
  }

  PlanBuilder& plan_;
  ArraySet set_;
  std::vector<HeadRange> stages_;
  std::vector<RankRows> rows_;  // of all other ranks, in rank order
  std::vector<Rows> block_;     // [cp] each rank's rows among them; own: none
  std::array<int, 2> kv_storages_{}, d_kv_storages_{};
  std::vector<int> kv_;  // [stages] array of the gathered keys and values
};

RankPlan gather_plan(const AttentionProblem& problem, int rank, std::vector<HeadRange> stages) {
  PlanBuilder plan(problem, rank);
  Gather gather(plan, std::move(stages));
  gather.forward();
  plan.begin(Pass::backward);
  gather.backward();
  return plan.take();
}

}  // namespace

std::vector<HeadRange> head_stages(int64_t kv_heads, int64_t at_once) {
  std::vector<HeadRange> stages;
  for (int64_t h = 0; h < kv_heads; h += at_once)
    stages.push_back({h, std::min(at_once, kv_heads - h)});
  return stages;
}

RankPlan all_gather_plan(const AttentionProblem& problem, int rank) {
  return gather_plan(problem, rank, {{0, problem.heads.kv_heads}});
}

RankPlan all_gather_strided_plan(const AttentionProblem& problem, int rank) {
  return gather_plan(problem, rank,
                     head_stages(problem.heads.kv_heads, problem.options.heads_at_once));
}

std::string all_gather_strided_refusal(const AttentionProblem& problem) {
  const int64_t at_once = problem.options.heads_at_once, heads = problem.heads.kv_heads;
  if (at_once >= 1 && at_once <= heads) return "";
  return fmt::format("{} KV heads at once of {}; the nearest valid number is {}", at_once, heads,
                     std::clamp<int64_t>(at_once, 1, heads));
}

}  // namespace gyre
