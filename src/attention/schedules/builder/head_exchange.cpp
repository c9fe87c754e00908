#include "attention/schedules/builder/head_exchange.hpp"

#include <algorithm>
#include <utility>

#include "attention/closed_forms.hpp"
#include "attention/schedules/builder/forms.hpp"
#include "attention/schedules/builder/ring_steps.hpp"

namespace gyre {
namespace {

/// Number of heads of `kind` that a member of an inner group gets.
int64_t heads_at(const FormContext& c, ArrayKind kind, int inner, int member) {
  const HeadRange q = assigned_heads(c.problem.heads.heads, inner, member);
  return has_keys(kind) ? kv_heads_read(q, c.problem.heads.group()).count : q.count;
}

/// Visible pairs of a group's ranks, times `heads`; nullopt without a formula; inner = cp has one.
std::optional<int64_t> group_pairs(const FormContext& c, int inner, int64_t heads) {
  if (inner == c.problem.cp()) return pairs_of_all_ranks(c.problem) * heads;
  int64_t pairs = 0;
  const int first = c.rank - c.rank % inner;
  for (int r = first; r < first + inner; ++r) {
    const auto of_rank = visible_pairs_of(c.problem, r);
    if (!of_rank) return std::nullopt;
    pairs += *of_rank;
  }
  return pairs * heads;
}

/// Adds the traffic when tokens go to heads: to each other member m, n rows of m's heads; from it,
/// n rows of this member's heads (n: rows of a rank). Returns the bytes of copies.
int64_t to_heads(const FormContext& c, ClosedForm& form, int inner, ArrayKind kind) {
  const int mine = c.rank % inner;
  const int64_t all = kind == ArrayKind::kv ? c.kv_heads() : c.problem.heads.heads;
  int64_t copies = 0;
  for (int m = 0; m < inner; ++m) {
    if (m == mine) continue;
    const int64_t heads = heads_at(c, kind, inner, m), here = heads_at(c, kind, inner, mine);
    const int64_t sent = wire(c, kind, c.slots(kind), heads);
    const int64_t received = wire(c, kind, c.slots(kind), here);
    form.messages += sent > 0 && !by_library(c.problem) ? 1 : 0;
    form.bytes_sent += sent;
    form.bytes_received += received;
    copies += by_library(c.problem) ? sent + received
                                    : copy(c, kind, c.slots(kind), heads, all) +
                                          copy(c, kind, c.slots(kind), here, here);
  }
  form.messages += by_library(c.problem) && c.slots(kind) > 0 ? 1 : 0;
  return copies;
}

/// Adds the traffic back to tokens, the reverse of to_heads; the caller counts the messages. With
/// `adds`, received rows are added to sums. Returns the bytes of copies.
int64_t to_tokens(const FormContext& c, ClosedForm& form, int inner, ArrayKind kind, bool adds) {
  const int mine = c.rank % inner;
  const int64_t all = kind == ArrayKind::d_kv ? c.kv_heads() : c.problem.heads.heads;
  const int64_t own_heads = heads_at(c, kind, inner, mine);
  int64_t copies = 0;
  for (int m = 0; m < inner; ++m) {
    if (m == mine) continue;
    const int64_t heads = heads_at(c, kind, inner, m);
    form.bytes_sent += wire(c, kind, c.slots(kind), own_heads);
    form.bytes_received += wire(c, kind, c.slots(kind), heads);
    if (by_library(c.problem)) {
      copies += wire(c, kind, c.slots(kind), own_heads) + wire(c, kind, c.slots(kind), heads);
      continue;
    }
    copies +=
        copy(c, kind, c.slots(kind), own_heads, own_heads) +
        (adds ? wire(c, kind, c.slots(kind), heads) : copy(c, kind, c.slots(kind), heads, all));
  }
  return copies;
}

/// Whether any rank of this rank's group sees keys of the group, and, if there are two groups,
/// whether any sees keys of the other group.
std::pair<bool, bool> group_sees(const FormContext& c, int inner) {
  const int first = c.rank - c.rank % inner;
  const auto sees_ranks_from = [&](int begin) {
    for (int r = first; r < first + inner; ++r)
      for (int p = begin; p < begin + inner; ++p)
        if (needed(c, r, p) > 0) return true;
    return false;
  };
  const bool two_groups = c.problem.cp() / inner == 2;
  return {sees_ranks_from(first), two_groups && sees_ranks_from(inner - first)};
}

}  // namespace

HeadExchange::HeadExchange(PlanBuilder& plan, std::vector<int> ranks)
    : plan_(plan), ranks_(std::move(ranks)) {
  const auto place_of = [&](int rank) { return std::ranges::find(ranks_, rank) - ranks_.begin(); };
  mine_ = static_cast<int>(place_of(plan.rank()));
  for (const ArrayKind kind : {ArrayKind::q, ArrayKind::kv}) {
    auto& pieces = pieces_.at(has_keys(kind) ? 1 : 0);
    pieces.resize(ranks_.size());
    int64_t row = 0;
    for (const RankRows& run : plan.rows_in_order(ranks_, kind)) {
      pieces[place_of(run.rank)].push_back({run.begin.value(), row, run.length});
      row += run.length;
    }
  }
  if (members() == 1) return;
  const auto make = [&](ArrayKind kind) {
    return plan_.add_array(kind, plan_.rows_in_order(ranks_, kind), heads_of(kind, mine_));
  };
  set_ = {make(ArrayKind::q),     make(ArrayKind::kv),    make(ArrayKind::out),
          make(ArrayKind::stats), make(ArrayKind::d_out), make(ArrayKind::d_q),
          make(ArrayKind::d_kv)};
}

HeadRange HeadExchange::heads_of(ArrayKind kind, int member) const {
  const HeadShape& shape = plan_.problem().heads;
  const HeadRange q = assigned_heads(shape.heads, members(), member);
  return has_keys(kind) ? kv_heads_read(q, shape.group()) : q;
}

bool HeadExchange::replicated() const {
  const HeadShape& shape = plan_.problem().heads;
  return kv_heads_assigned(shape.heads, shape.kv_heads, members()) > shape.kv_heads;
}

std::vector<Message> HeadExchange::messages() const {
  std::vector<Message> messages;
  for (const int rank : ranks_) messages.push_back({rank, {}});
  return messages;
}

void HeadExchange::there(ArrayKind kind, int array, std::vector<Message>& sends,
                         std::vector<Message>& recvs) const {
  for (int m = 0; m < members(); ++m) {
    const size_t i = m;
    for (const Piece& piece : pieces(kind, mine_))
      sends[i].slices.push_back({own(kind), piece.slot, piece.length, heads_of(kind, m)});
    for (const Piece& piece : pieces(kind, m))
      recvs[i].slices.push_back({array, piece.row, piece.length, heads_of(kind, mine_)});
  }
}

void HeadExchange::back(ArrayKind kind, int array, bool add, std::vector<Message>& sends,
                        std::vector<Message>& recvs) const {
  there(kind, array, recvs, sends);
  for (Message& m : recvs)
    for (Slice& slice : m.slices) slice.add = slice.add || (add && slice.array == own(kind));
}

int HeadExchange::exchange(std::string what, std::vector<Message> sends,
                           std::vector<Message> recvs) const {
  return plan_.exchange(std::move(what), std::move(sends), std::move(recvs),
                        by_library(plan_.problem()) ? Transport::all_to_all : Transport::messages,
                        ranks_);
}

void HeadExchange::before_forward() {
  if (members() == 1) return;
  std::vector<Message> sends = messages(), recvs = messages();
  there(ArrayKind::q, set_.q, sends, recvs);
  const int q = exchange("Q to heads", std::move(sends), std::move(recvs));
  sends = messages(), recvs = messages();
  there(ArrayKind::kv, set_.kv, sends, recvs);
  const int kv = exchange("KV to heads", std::move(sends), std::move(recvs));
  plan_.wait(q);
  plan_.wait(kv);
}

void HeadExchange::after_forward() {
  if (members() == 1) return;
  std::vector<Message> sends = messages(), recvs = messages();
  back(ArrayKind::out, set_.out, false, sends, recvs);
  plan_.wait(exchange("O to tokens", std::move(sends), std::move(recvs)));
}

void HeadExchange::before_backward() {
  if (members() == 1) return;
  std::vector<Message> sends = messages(), recvs = messages();
  there(ArrayKind::d_out, set_.d_out, sends, recvs);
  plan_.wait(exchange("dO to heads", std::move(sends), std::move(recvs)));
}

void HeadExchange::after_backward() {
  if (members() == 1) return;
  std::vector<Message> sends = messages(), recvs = messages();
  back(ArrayKind::d_q, set_.d_q, false, sends, recvs);
  if (replicated()) plan_.clear(own(ArrayKind::d_kv));
  back(ArrayKind::d_kv, set_.d_kv, replicated(), sends, recvs);
  plan_.wait(exchange("dQ and dKV to tokens", std::move(sends), std::move(recvs)));
}

ClosedForm head_exchange_form(const FormContext& c, int inner) {
  const int mine = c.rank % inner, outer = c.problem.cp() / inner;
  const auto [sees_own, sees] = group_sees(c, inner);
  const int64_t rows = inner * c.slots(ArrayKind::q), keys = inner * c.slots(ArrayKind::kv);
  const int64_t q = heads_at(c, ArrayKind::q, inner, mine),
                kv = heads_at(c, ArrayKind::kv, inner, mine);
  ClosedForm form = ring_form(c, outer, keys, kv, true, sees);
  form.pairs = group_pairs(c, inner, q);
  if (inner == 1 || keys == 0) return form;

  const bool replicated =
      kv_heads_assigned(c.problem.heads.heads, c.kv_heads(), inner) > c.kv_heads();
  const int64_t ring = ring_copies(c, outer, keys, kv, true);
  int64_t before = 0, after = 0;  // bytes of copies of exchanges that do not overlap
  int64_t arrays = stored(c, ArrayKind::out, rows, q) + stored(c, ArrayKind::stats, rows, q);
  const int64_t inputs = stored(c, ArrayKind::q, rows, q) + stored(c, ArrayKind::kv, keys, kv);
  if (c.forward()) {
    before = to_heads(c, form, inner, ArrayKind::q) + to_heads(c, form, inner, ArrayKind::kv);
    after = to_tokens(c, form, inner, ArrayKind::out, false);
    arrays += inputs;
  } else {
    before = to_heads(c, form, inner, ArrayKind::d_out);
    after = to_tokens(c, form, inner, ArrayKind::d_q, false) +
            to_tokens(c, form, inner, ArrayKind::d_kv, replicated);
    arrays += stored(c, ArrayKind::d_out, rows, q) + stored(c, ArrayKind::d_q, rows, q) +
              stored(c, ArrayKind::d_kv, keys, kv) + (sees_own ? inputs : 0);
  }
  // Back to tokens: one message per other member.
  if (!c.forward() || c.slots(ArrayKind::out) > 0)
    form.messages += by_library(c.problem) ? 1 : (q > 0 ? inner - 1 : 0);
  // ring_form has already counted the ring's copies.
  form.transient_bytes += arrays + std::max({before, ring, after}) - ring;
  return form;
}

}  // namespace gyre
