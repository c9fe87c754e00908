// All-to-all attention (DeepSpeed Ulysses, arXiv 2309.14509): tokens are exchanged for heads, so
// that each rank attends all tokens with some of the heads.
//
// Forward:
//
//     q, kv:  [own tokens, all heads]  ->  [all tokens, own heads]
//     attend
//     out:    [all tokens, own heads]  ->  [own tokens, all heads]
//
// Backward: d_out goes to the heads, d_q and d_kv come back in one exchange; q, kv, out and the
// statistics are still there from forward. Tokens lie in rank order; rectangles put them in order.
//
// Query heads are dealt evenly; a rank gets the KV heads that its query heads read. A KV head which
// several ranks read is sent to each, and their gradients are added in rank order. With more ranks
// than query heads the last ranks get none and only send and receive.
//
//     6 query heads, 2 KV heads (group 3)      cp = 4           cp = 8
//     rank                                     0  1  2  3       0  1  2  3  4  5  6  7
//     query heads                              01 23 4  5       0  1  2  3  4  5  -  -
//     KV heads                                 0  01 1  1       0  0  0  1  1  1  -  -

#include <algorithm>

#include "attention/schedules/builder.hpp"
#include "attention/schedules/registry.hpp"
#include "core/error.hpp"

namespace gyre {

HeadRange dealt_heads(int64_t heads, int members, int member) {
  const int64_t each = heads / members, more = heads % members;
  return {member * each + std::min<int64_t>(member, more), each + (member < more ? 1 : 0)};
}

HeadRange kv_heads_read(HeadRange q, const HeadShape& heads) {
  if (q.count == 0) return {};
  const int64_t begin = q.begin / heads.group(), end = ceil_div(q.end(), heads.group());
  return {begin, end - begin};
}

HeadExchange::HeadExchange(PlanBuilder& plan, std::vector<int> ranks)
    : plan_(plan), ranks_(std::move(ranks)) {
  int64_t row = 0;
  for (int m = 0; m < members(); ++m) {
    const int rank = ranks_[static_cast<size_t>(m)];
    if (rank == plan.rank()) mine_ = m;
    const RankRows run = plan.rows_of(rank).front();
    rows_.push_back(run);
    part_.push_back({row, run.length});
    row += run.length;
  }
  if (members() == 1) return;
  const auto make = [&](ArrayKind kind) {
    return plan_.add_array(kind, rows_, heads_of(kind, mine_));
  };
  set_ = {make(ArrayKind::q),     make(ArrayKind::kv),    make(ArrayKind::out),
          make(ArrayKind::stats), make(ArrayKind::d_out), make(ArrayKind::d_q),
          make(ArrayKind::d_kv)};
}

HeadRange HeadExchange::heads_of(ArrayKind kind, int member) const {
  const HeadShape& shape = plan_.problem().heads;
  const HeadRange q = dealt_heads(shape.heads, members(), member);
  return kind == ArrayKind::kv || kind == ArrayKind::d_kv ? kv_heads_read(q, shape) : q;
}

bool HeadExchange::replicated() const {
  int64_t read = 0;
  for (int m = 0; m < members(); ++m) read += heads_of(ArrayKind::kv, m).count;
  return read > plan_.problem().heads.kv_heads;
}

std::vector<Message> HeadExchange::messages() const {
  std::vector<Message> messages;
  for (const int rank : ranks_) messages.push_back({rank, {}});
  return messages;
}

void HeadExchange::there(ArrayKind kind, int array, std::vector<Message>& sends,
                         std::vector<Message>& recvs) const {
  for (int m = 0; m < members(); ++m) {
    const auto i = static_cast<size_t>(m);
    sends[i].slices.push_back(
        {own(kind), 0, part_[static_cast<size_t>(mine_)].length, heads_of(kind, m)});
    recvs[i].slices.push_back({array, part_[i].begin, part_[i].length, heads_of(kind, mine_)});
  }
}

void HeadExchange::back(ArrayKind kind, int array, bool add, std::vector<Message>& sends,
                        std::vector<Message>& recvs) const {
  there(kind, array, recvs, sends);
  for (Message& m : recvs)
    for (Slice& slice : m.slices) slice.add = slice.add || (add && slice.array == own(kind));
}

void HeadExchange::before_forward() {
  if (members() == 1) return;
  std::vector<Message> sends = messages(), recvs = messages();
  there(ArrayKind::q, set_.q, sends, recvs);
  const int q = plan_.exchange("Q to heads", std::move(sends), std::move(recvs));
  sends = messages(), recvs = messages();
  there(ArrayKind::kv, set_.kv, sends, recvs);
  const int kv = plan_.exchange("KV to heads", std::move(sends), std::move(recvs));
  plan_.wait(q);
  plan_.wait(kv);
}

void HeadExchange::after_forward() {
  if (members() == 1) return;
  std::vector<Message> sends = messages(), recvs = messages();
  back(ArrayKind::out, set_.out, false, sends, recvs);
  plan_.wait(plan_.exchange("O to tokens", std::move(sends), std::move(recvs)));
}

void HeadExchange::before_backward() {
  if (members() == 1) return;
  std::vector<Message> sends = messages(), recvs = messages();
  there(ArrayKind::d_out, set_.d_out, sends, recvs);
  plan_.wait(plan_.exchange("dO to heads", std::move(sends), std::move(recvs)));
}

void HeadExchange::after_backward() {
  if (members() == 1) return;
  std::vector<Message> sends = messages(), recvs = messages();
  back(ArrayKind::d_q, set_.d_q, false, sends, recvs);
  if (replicated()) plan_.clear(own(ArrayKind::d_kv));
  back(ArrayKind::d_kv, set_.d_kv, replicated(), sends, recvs);
  plan_.wait(plan_.exchange("dQ and dKV to tokens", std::move(sends), std::move(recvs)));
}

RankPlan all_to_all_plan(const AttentionProblem& problem, int rank) {
  PlanBuilder plan(problem, rank);
  std::vector<int> ranks;
  for (int r = 0; r < problem.cp(); ++r) ranks.push_back(r);
  HeadExchange heads(plan, std::move(ranks));
  const ArraySet& set = heads.arrays();
  heads.before_forward();
  plan.clear(set.out);
  plan.clear(set.stats);
  plan.compute(set, set.kv);
  plan.finish(set);
  heads.after_forward();
  plan.begin(Pass::backward);
  heads.before_backward();
  plan.delta(set);
  plan.clear(set.d_q);
  plan.clear(set.d_kv);
  plan.compute(set, set.kv, set.d_kv);
  plan.sink_gradient(set.stats);
  heads.after_backward();
  return plan.take(set.stats);
}

}  // namespace gyre
