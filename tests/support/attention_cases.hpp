#pragma once
// Attention problems for tests, and a machine that executes the plans of all ranks symbolically,
// with sets of terms instead of numbers.
//
// For each (row, head) of a plan array the machine tracks whether it was written, which terms were
// merged or added to it (keys of a query, queries of a key), and whether a message reads or writes
// it. A fault is any of
//     a read of an element that is not written, not in this storage any more, or not yet received
//     a write into an element that a message still reads or writes, or into inputs
//     a storage taken while a message uses it
//     a message whose two ends differ, in slices, rows, heads or kind
//     a deadlock, if every rank's exchanges are executed in order, and an exchange is complete when
//         all its messages have met their other ends
//     a result that does not have exactly the terms of the mask, each once
// The mask is applied to the boundaries of the documents alone, not to fragments or rectangles.

#include <fmt/ranges.h>
#include <rapidcheck.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention/schedules/registry.hpp"
#include "layout_cases.hpp"
#include "mask_cases.hpp"
#include "sharding/padded_layout.hpp"

namespace gyre {
inline void showValue(const HeadShape& shape, std::ostream& os) {
  os << shape.heads << " heads over " << shape.kv_heads << " of " << name_of_dims(shape);
}
inline void showValue(DType type, std::ostream& os) {
  os << name_of(type);
}
}  // namespace gyre

namespace gyre::test {

/// An attention problem, and the layouts that it refers to.
struct AttentionCase {
  LayoutCase layout;
  HeadShape heads;
  MaskRule mask;
  ScheduleOptions options;
  std::optional<Layout> query_layout = {};  ///< if only the last tokens of documents have queries
  Bounds documents = {};                    ///< then: all tokens, without padding
  /// The problem refers to this object, which must outlive it.
  AttentionProblem problem() const {
    return {&layout.layout,
            heads,
            mask,
            options,
            PlanPasses::both,
            query_layout ? &*query_layout : nullptr};
  }
  SegmentBounds bounds() const { return (query_layout ? documents : layout.bounds).view(); }
};

inline HeadShape shape_of(int64_t heads, int64_t kv_heads, int64_t head_dim = 2,
                          int64_t v_head_dim = 0, int64_t shared_key_dim = 0) {
  return {heads, kv_heads, head_dim, 0.5F, v_head_dim, shared_key_dim};
}

/// Boundaries in a layout of the given kind.
inline LayoutCase layout_case(const std::string& kind, const Bounds& bounds, int cp,
                              int64_t stripe = 1) {
  LayoutCase result;
  result.kind = kind;
  result.options.cp = cp;
  result.options.stripe = stripe;
  result.bounds = bounds;
  result.layout = find_layout(kind).make(bounds.view(), result.options);
  return result;
}

/// Real lengths of the segments.
inline std::vector<int64_t> lengths_of(const Bounds& bounds) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < bounds.view().segments(); ++i)
    lengths.push_back(bounds.view().real_length(i));
  return lengths;
}

/// Takes the queries of the first tokens of documents away: documents have any number.
inline void drop_queries(AttentionCase& c) {
  const std::vector<int64_t> lengths = lengths_of(c.layout.bounds);
  std::vector<int64_t> offsets{0}, query_offsets{0};
  for (const int64_t length : lengths) {
    offsets.push_back(offsets.back() + length);
    query_offsets.push_back(query_offsets.back() + *rc::gen::inRange<int64_t>(0, length + 1));
  }
  QueryLayouts placed(offsets, query_offsets, find_layout(c.layout.kind), c.layout.options);
  c.layout.layout = std::move(placed.layout);
  c.query_layout = std::move(placed.query_layout);
  c.documents = full_bounds(lengths);
  c.mask = of_last_queries(c.mask, offsets, query_offsets);
}

/// Any layout of random documents, mask, queries of all tokens or of the last ones, heads (groups
/// of 1, 2, 3, 4 and all; fewer KV heads than ranks; heads that do not divide) and valid options.
inline AttentionCase arbitrary_attention(int cp) {
  AttentionCase result;
  const LayoutKind& kind = *rc::gen::elementOf(layout_kinds());
  LayoutCase& layout = result.layout;
  layout.kind = kind.name;
  layout.options.cp = cp;
  layout.options.stripe = *rc::gen::inRange<int64_t>(1, 6);
  layout.options.chunk = *rc::gen::inRange<int64_t>(0, 9);
  layout.bounds = arbitrary_bounds(kind.segment_multiple(cp));
  layout.layout = kind.make(layout.bounds.view(), layout.options);
  result.heads =
      *rc::gen::element(shape_of(1, 1), shape_of(2, 2), shape_of(4, 2, 3, 2), shape_of(8, 8),
                        shape_of(8, 2), shape_of(8, 1), shape_of(6, 2), shape_of(5, 5),
                        shape_of(8, 8, 3, 2, 1), shape_of(8, 4, 5, 3, 3));
  result.mask = arbitrary_mask(lengths_of(layout.bounds));
  std::vector<int> divisors = {0};
  for (int d = 1; d <= cp; ++d)
    if (cp % d == 0) divisors.push_back(d);
  result.options.inner = *rc::gen::elementOf(divisors);
  result.options.heads_at_once = *rc::gen::inRange<int64_t>(1, result.heads.kv_heads + 1);
  result.options.collectives = *rc::gen::inRange<int64_t>(0, 2);
  result.options.merge = *rc::gen::inRange<int64_t>(0, 2);
  if (*rc::gen::inRange(0, 3) == 0) drop_queries(result);
  return result;
}

/// Stream slots of the keys that each query sees, from the boundaries alone: [padded_slots].
inline std::vector<std::vector<int64_t>> visible_keys(const SegmentBounds& bounds,
                                                      const MaskRule& mask, int64_t padded_slots) {
  std::vector<std::vector<int64_t>> keys(static_cast<size_t>(padded_slots));
  for (int64_t s = 0; s < bounds.segments(); ++s)
    for (int64_t q = 0; q < bounds.real_length(s); ++q)
      for (int64_t k = 0; k < bounds.real_length(s); ++k)
        if (shows(mask, s, q, k)) keys[bounds.begin(s) + q].push_back(bounds.begin(s) + k);
  return keys;
}

/// The symbolic machine; see the top of this file.
class PlanMachine {
 public:
  PlanMachine(const Plan& plan, const AttentionProblem& problem, const SegmentBounds& bounds)
      : plan_(plan), problem_(problem), ranks_(plan.ranks.size()) {
    const std::vector<std::vector<int64_t>> of_keys = slots_of(*problem.layout, bounds),
                                            of_queries =
                                                problem.query_layout == nullptr
                                                    ? of_keys
                                                    : slots_of(*problem.query_layout, bounds);
    keys_ = visible_keys(bounds, problem.mask, slots_);
    queries_.resize(keys_.size());
    for (size_t q = 0; q < keys_.size(); ++q)
      for (const int64_t k : keys_[q]) queries_[k].push_back(static_cast<int64_t>(q));
    for (size_t r = 0; r < ranks_.size(); ++r)
      for (const PlanArray& a : plan.ranks[r].arrays) {
        std::vector<int64_t>& slots = ranks_[r].slots.emplace_back();
        for (const RankRows& run : a.rows)
          for (int64_t i = 0; i < run.length; ++i)
            slots.push_back(
                (has_keys(a.kind) ? of_keys : of_queries)[run.rank][(run.begin + i).value()]);
      }
  }

  /// The first fault in a forward pass and the backward pass after it; "" if there is none.
  std::string fault() {
    try {
      run(Pass::forward);
      check_forward();
      run(Pass::backward);
      check_backward();
    } catch (const std::runtime_error& error) {
      return plan_.schedule + ": " + error.what();
    }
    return "";
  }

 private:
  struct Cell {
    bool written = false, finished = false, delta = false;
    int sending = 0, receiving = 0;  // messages in flight
    std::vector<int64_t> terms;
  };
  struct Memory {
    int array = -1;  // array in this storage; -1: none
    int messages = 0;
    std::vector<Cell> cells;  // [rows, heads]
  };
  /// Contents of a slice when it was sent.
  struct Sent {
    ArrayKind kind;
    std::vector<int64_t> slots;
    HeadRange heads;
    std::vector<Cell> cells;
  };
  struct Posted {
    const step::Exchange* exchange;
    std::vector<std::vector<Sent>> sent;         // [sends]
    std::vector<size_t> send_place, recv_place;  // positions in the queues of their peers
    bool waited = false;
  };
  struct Rank {
    std::vector<std::vector<int64_t>> slots;  // [arrays][rows] stream slots
    std::map<int, Memory> memory;             // by storage
    std::map<int, std::vector<int>> adding;   // by array: messages in flight [rows, heads]
    std::vector<Posted> posted;
    step::Delta delta;  // the latest one
    size_t over = 0;    // number of complete exchanges, from the first on
    size_t step = 0;
  };
  /// The index of the exchange of each message from one rank to another, in order, and its place in
  /// that exchange.
  struct Queue {
    std::vector<std::pair<size_t, size_t>> sends, recvs;
  };

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw std::runtime_error(fmt::format("{} rank {} step {}: {}", name_of(pass_), at_, at_step_,
                                         fmt::format(format, std::forward<Args>(args)...)));
  }
  Rank& rank() { return ranks_[at_]; }
  const PlanArray& array(int index) const {
    const auto& arrays = plan_.ranks[at_].arrays;
    if (index < 0 || index >= std::ssize(arrays)) fail("there is no array {}", index);
    return arrays[index];
  }
  const std::vector<int64_t>& slots(int index) { return rank().slots[index]; }

  /// The stream slot of each row of each rank. With a layout of queries: the slot that the row's
  /// token has in the stream of all documents, and slots behind it for padding.
  std::vector<std::vector<int64_t>> slots_of(const Layout& layout, const SegmentBounds& bounds) {
    std::vector<std::vector<int64_t>> slots(ranks_.size());
    for (int r = 0; r < layout.cp(); ++r) {
      if (problem_.query_layout == nullptr) {
        const std::vector<int32_t> index = shard_index(layout, r);
        slots[r].assign(index.begin(), index.end());
        slots_ = layout.padded_slots;
        continue;
      }
      slots_ = std::max(slots_, bounds.slots());
      slots[r].assign(layout.shard(r).slots, -1);
      for (const Fragment& f : layout.shard(r).fragments)
        for (int64_t i = 0; i < f.length; ++i)
          slots[r][f.local_begin.value() + i] =
              bounds.begin(f.segment) + f.start.value() + i * f.stride;
      for (int64_t& slot : slots[r])
        if (slot < 0) slot = slots_++;
    }
    return slots;
  }

  // ---- memory ----

  size_t place(int index, int64_t row, int64_t head) {
    const PlanArray& a = array(index);
    if (row < 0 || row >= std::ssize(slots(index)) || head < a.heads.begin || head >= a.heads.end())
      fail("array {} ({}) has no row {}, head {}", index, name_of(a.kind), row, head);
    return static_cast<size_t>(row * a.heads.count + head - a.heads.begin);
  }
  size_t places(int index) {
    return slots(index).size() * static_cast<size_t>(array(index).heads.count);
  }
  Cell& cell(int index, int64_t row, int64_t head) {
    const PlanArray& a = array(index);
    Memory& m = rank().memory[a.storage];
    if (m.array != index)
      fail("array {} ({}) is not in storage {} (any more)", index, name_of(a.kind), a.storage);
    return m.cells[place(index, row, head)];
  }
  /// Messages in flight that will be added.
  int& adding(int index, int64_t row, int64_t head) {
    std::vector<int>& all = rank().adding[index];
    all.resize(places(index), 0);
    return all[place(index, row, head)];
  }
  Cell& read(int index, int64_t row, int64_t head) {
    Cell& c = cell(index, row, head);
    if (!c.written)
      fail("array {}: row {}, head {} is read before it is written", index, row, head);
    if (c.receiving + adding(index, row, head) > 0)
      fail("array {}: row {}, head {} is read while it is received", index, row, head);
    return c;
  }
  Cell& change(int index, int64_t row, int64_t head) {
    Cell& c = cell(index, row, head);
    if (!c.written) fail("array {}: row {}, head {} is changed but not set", index, row, head);
    if (c.sending + c.receiving > 0)
      fail("array {}: row {}, head {} is changed while a message has it", index, row, head);
    return c;
  }
  bool is_input(int index) const {
    return index < array_kinds && (index == own(ArrayKind::q) || index == own(ArrayKind::kv) ||
                                   index == own(ArrayKind::d_out));
  }
  /// The storage of an array; allocates it if it does not exist yet.
  Memory& take(int index) {
    const PlanArray& a = array(index);
    Memory& m = rank().memory[a.storage];
    if (is_input(index)) fail("the input {} is written", name_of(a.kind));
    if (m.array == index) return m;
    if (m.messages > 0) fail("storage {} is taken while a message uses it", a.storage);
    m = {index, 0, std::vector<Cell>(places(index))};
    return m;
  }
  template <class F>
  void each_cell(int index, F f) {
    for (int64_t row = 0; row < std::ssize(slots(index)); ++row)
      for (int64_t h = array(index).heads.begin; h < array(index).heads.end(); ++h) f(row, h);
  }
  template <class F>
  void each_cell(const Slice& slice, F f) {
    for (int64_t row = slice.row; row < slice.row + slice.rows; ++row)
      for (int64_t h = slice.heads.begin; h < slice.heads.end(); ++h) f(row, h);
  }

  // ---- messages ----

  /// Checks what a library's collective requires of its messages; see Transport.
  void check_library(const step::Exchange& s) {
    const auto members = std::ssize(s.group);
    if (!std::ranges::is_sorted(s.group) || !std::ranges::binary_search(s.group, at_))
      fail("not in the group of {}", s.what);
    for (const auto* messages : {&s.sends, &s.recvs})
      for (const Message& m : *messages)
        if (!std::ranges::binary_search(s.group, m.peer)) fail("rank {} is in no group", m.peer);
    if (s.transport == Transport::all_to_all) return;
    const bool gathers = s.transport == Transport::all_gather;
    const auto &blocks = gathers ? s.recvs : s.sends, &parts = gathers ? s.sends : s.recvs;
    if (std::ssize(blocks) != members - 1 || std::ssize(parts) != members - 1)
      fail("{} messages of {} members", blocks.size(), members);
    const Slice& part = parts.front().slices.front();
    for (const Message& m : parts)
      if (m.slices.size() != 1 || !same_place(m.slices[0], part))
        fail("members get different parts");
    for (const Message& m : blocks) {
      const auto place = std::ranges::find(s.group, m.peer) - s.group.begin();
      const Slice& slice = m.slices.front();
      const PlanArray& whole = array(slice.array);
      if (m.slices.size() != 1 || slice.array != blocks.front().slices.front().array ||
          slice.rows != part.rows || slice.row != place * part.rows || slice.heads != whole.heads ||
          whole.heads != part.heads || whole.tokens() != members * part.rows)
        fail("the block of rank {} is not in its place", m.peer);
    }
  }
  static bool same_place(const Slice& a, const Slice& b) {
    return a.array == b.array && a.row == b.row && a.rows == b.rows && a.heads == b.heads &&
           a.add == b.add;
  }

  void operator()(const step::Exchange& s) {
    if (s.transport != Transport::messages) check_library(s);
    Posted posted{&s, {}, {}, {}, false};
    const size_t index = rank().posted.size();
    for (const auto* messages : {&s.sends, &s.recvs}) {
      std::set<int> peers;
      for (const Message& m : *messages) {
        if (m.peer < 0 || m.peer >= std::ssize(ranks_)) fail("there is no rank {}", m.peer);
        if (!peers.insert(m.peer).second) fail("two messages for rank {}", m.peer);
      }
    }
    for (const Message& m : s.sends) {
      auto& queue = queues_[{at_, m.peer}].sends;
      posted.send_place.push_back(queue.size());
      queue.emplace_back(index, posted.sent.size());
      std::vector<Sent>& sent = posted.sent.emplace_back();
      for (const Slice& slice : m.slices) sent.push_back(send(slice));
    }
    for (const Message& m : s.recvs) {
      auto& queue = queues_[{m.peer, at_}].recvs;
      posted.recv_place.push_back(queue.size());
      queue.emplace_back(index, 0);
      for (const Slice& slice : m.slices) receive(slice, m.peer == at_);
    }
    rank().posted.push_back(std::move(posted));
  }
  Sent send(const Slice& slice) {
    Sent sent{array(slice.array).kind, {}, slice.heads, {}};
    for (int64_t i = 0; i < slice.rows; ++i)
      sent.slots.push_back(slots(slice.array).at(static_cast<size_t>(slice.row + i)));
    each_cell(slice, [&](int64_t row, int64_t head) {
      sent.cells.push_back(read(slice.array, row, head));
      ++cell(slice.array, row, head).sending;
    });
    ++rank().memory[array(slice.array).storage].messages;
    return sent;
  }
  /// A slice to be added need not have arrived: it is added at the Wait. A local copy may be made
  /// at once.
  void receive(const Slice& slice, bool local) {
    if (slice.add && is_input(slice.array)) fail("an input is added to");
    if (!slice.add) take(slice.array);
    each_cell(slice, [&](int64_t row, int64_t head) {
      if (slice.add && local) change(slice.array, row, head);
      if (slice.add) {
        ++adding(slice.array, row, head);
        return;
      }
      Cell& c = cell(slice.array, row, head);
      if (c.written || c.receiving + c.sending > 0)
        fail("array {}: row {}, head {} is received again", slice.array, row, head);
      c.receiving = 1;
    });
    if (!slice.add) ++rank().memory[array(slice.array).storage].messages;
  }
  /// Completes exchanges whose messages have all met their other ends. True if there were any.
  bool progress() {
    bool some = false;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      Rank& mine = ranks_[r];
      if (mine.over == mine.posted.size()) continue;
      const Posted& posted = mine.posted[mine.over];
      const auto met = [&](const auto& ends, size_t place, int peer) {
        return place < ends.size() && ends[place].first <= ranks_[peer].over;
      };
      bool all = true;
      for (size_t i = 0; i < posted.send_place.size(); ++i) {
        const int peer = posted.exchange->sends[i].peer;
        all = all && met(queues_[{static_cast<int>(r), peer}].recvs, posted.send_place[i], peer);
      }
      for (size_t i = 0; i < posted.recv_place.size(); ++i) {
        const int peer = posted.exchange->recvs[i].peer;
        all = all && met(queues_[{peer, static_cast<int>(r)}].sends, posted.recv_place[i], peer);
      }
      mine.over += all ? 1 : 0;
      some = some || all;
    }
    return some;
  }
  /// Returns false if the step must wait.
  bool wait(int id) {
    std::vector<Posted>& posted = rank().posted;
    const auto p = std::find_if(posted.begin(), posted.end(),
                                [&](const Posted& x) { return x.exchange->id == id; });
    if (p == posted.end()) fail("waits for exchange {}, which was not started", id);
    if (p->waited) fail("waits for exchange {} again", id);
    if (p - posted.begin() >= static_cast<std::ptrdiff_t>(rank().over)) return false;
    p->waited = true;
    for (const Message& m : p->exchange->sends)
      for (const Slice& slice : m.slices) {
        each_cell(slice, [&](int64_t row, int64_t h) { --cell(slice.array, row, h).sending; });
        --rank().memory[array(slice.array).storage].messages;
      }
    for (size_t i = 0; i < p->recv_place.size(); ++i) {
      const Message& m = p->exchange->recvs[i];
      const auto [exchange, place] = queues_[{m.peer, at_}].sends[p->recv_place[i]];
      deliver(m, ranks_[m.peer].posted[exchange].sent[place]);
    }
    return true;
  }
  void deliver(const Message& m, const std::vector<Sent>& sent) {
    if (m.slices.size() != sent.size())
      fail("{} slices from rank {}, which sent {}", m.slices.size(), m.peer, sent.size());
    for (size_t i = 0; i < sent.size(); ++i) {
      const Slice& slice = m.slices[i];
      const Sent& from = sent[i];
      if (array(slice.array).kind != from.kind || slice.heads != from.heads ||
          slice.rows != std::ssize(from.slots))
        fail("slice {} from rank {} is not what was sent", i, m.peer);
      size_t next = 0;
      each_cell(slice, [&](int64_t row, int64_t head) {
        const int64_t slot = slots(slice.array)[row];
        if (const int64_t came = from.slots[row - slice.row]; came != slot)
          fail("array {}, row {} is for slot {} but gets slot {} from rank {}", slice.array, row,
               slot, came, m.peer);
        const Cell& value = from.cells[next++];
        Cell& c = cell(slice.array, row, head);
        if (slice.add) {
          change(slice.array, row, head);
          --adding(slice.array, row, head);
          c.terms.insert(c.terms.end(), value.terms.begin(), value.terms.end());
        } else {
          c = value;
          c.sending = c.receiving = 0;
        }
      });
      if (!slice.add) --rank().memory[array(slice.array).storage].messages;
    }
  }

  // ---- computing ----

  void operator()(const step::Clear& s) {
    take(s.array);
    each_cell(s.array, [&](int64_t row, int64_t head) {
      Cell& c = cell(s.array, row, head);
      if (c.written || c.sending + c.receiving > 0)
        fail("array {} is cleared while it is in use", s.array);
      c.written = true;
    });
  }
  void same_rows(int a, int b) {
    if (slots(a) != slots(b) || array(a).heads != array(b).heads)
      fail("arrays {} and {} have different rows or heads", a, b);
  }
  void operator()(const step::Compute& s) {
    const bool forward = pass_ == Pass::forward;
    if (forward ? s.out < 0 || s.d_q >= 0 || s.d_kv >= 0
                : s.out >= 0 || s.d_out < 0 || (s.d_q < 0 && s.d_kv < 0))
      fail("arrays of the other direction");
    for (const int other : {s.stats, s.out, s.d_out, s.d_q})
      if (other >= 0) same_rows(s.q, other);
    if (s.d_kv >= 0) same_rows(s.kv, s.d_kv);
    const HeadRange heads = query_heads_of(array(s.q).heads, s.kv_heads, problem_.heads);
    int64_t begin = 0;
    for (const Rectangle& r : s.rectangles) {
      if (r.q_begin < begin) fail("rectangles are not sorted");
      begin = r.q_begin;
      for (int64_t i = 0; i < r.q_length; ++i) {
        const int64_t first = std::clamp<int64_t>(r.mask.begin_key(i), 0, r.k_length);
        const int64_t last = std::clamp<int64_t>(r.mask.end_key(i), first, r.k_length);
        for (int64_t h = heads.begin; h < heads.end() && first < last; ++h)
          attend(s, begin + i, h, r.k_begin + first, r.k_begin + last);
      }
    }
  }
  /// Query `row`, head `head` of s.q meets the keys of rows [first, last).
  void attend(const step::Compute& s, int64_t row, int64_t head, int64_t first, int64_t last) {
    const int64_t kv_head = head / problem_.heads.group();
    const int64_t slot = slots(s.q)[row];
    read(s.q, row, head);
    if (pass_ == Pass::backward) {
      read(s.d_out, row, head);
      const Cell& stats = read(s.stats, row, head);
      if (!stats.finished || !stats.delta) fail("statistics of row {} are not final", row);
      if (const step::Delta& d = rank().delta; d.stats == s.stats && d.d_out == s.d_out)
        read(d.out, row, head);  // a kernel may
    }
    for (int64_t k = first; k < last; ++k) {
      read(s.kv, k, kv_head);
      const int64_t key = slots(s.kv)[k];
      for (const int sum : {s.out, s.d_q, pass_ == Pass::forward ? s.stats : -1}) {
        if (sum < 0) continue;
        Cell& c = change(sum, row, head);
        if (c.finished) fail("array {}, row {} is finished already", sum, row);
        c.terms.push_back(key);
      }
      if (s.d_kv >= 0)
        change(s.d_kv, k, kv_head).terms.push_back(slot * problem_.heads.heads + head);
    }
  }
  void operator()(const step::Merge& s) {
    for (const auto& [out, stats] : s.partials)
      for (const auto& [from, to] : {std::pair(out, s.out), std::pair(stats, s.stats)}) {
        same_rows(from, to);
        each_cell(to, [&](int64_t row, int64_t head) {
          const std::vector<int64_t>& terms = read(from, row, head).terms;
          std::vector<int64_t>& sum = change(to, row, head).terms;
          sum.insert(sum.end(), terms.begin(), terms.end());
        });
      }
  }
  void operator()(const step::Finish& s) {
    same_rows(s.out, s.stats);
    for (const int index : {s.out, s.stats})
      each_cell(index, [&](int64_t row, int64_t head) {
        read(index, row, head);
        Cell& c = change(index, row, head);
        if (c.finished) fail("array {} is finished twice", index);
        c.finished = true;
      });
  }
  void operator()(const step::Delta& s) {
    rank().delta = s;
    same_rows(s.out, s.stats);
    same_rows(s.out, s.d_out);
    each_cell(s.stats, [&](int64_t row, int64_t head) {
      read(s.d_out, row, head);
      if (!read(s.out, row, head).finished) fail("delta of an output that is not final");
      Cell& c = change(s.stats, row, head);
      if (c.delta) fail("delta twice");
      c.delta = true;
    });
  }
  void operator()(const step::SinkGradient& s) {
    std::map<std::pair<int64_t, int64_t>, int> seen;
    each_cell(s.stats, [&](int64_t row, int64_t head) {
      const Cell& c = read(s.stats, row, head);
      if (!c.finished || !c.delta) fail("sinks from statistics that are not final");
      const int64_t slot = slots(s.stats)[row];
      if (!keys_[slot].empty()) ++seen[{slot, head}];
    });
    if (s.complete) {
      check_every_row_once(seen, "sinks");
      ++complete_sinks_;
    } else {
      for (const auto& [place, times] : seen) sinks_[place] += times;
    }
  }

  // ---- running and checking ----

  void run(Pass pass) {
    pass_ = pass;
    queues_.clear();
    for (at_ = 0; at_ < std::ssize(ranks_); ++at_) start_pass();
    for (bool moved = true, ended = false; !ended;) {
      if (!moved) fail_deadlock();
      moved = ended = false;
      int done = 0;
      for (at_ = 0; at_ < std::ssize(ranks_); ++at_) {
        const size_t before = rank().step;
        advance();
        moved = moved || rank().step > before;
        done += rank().step == steps().size() ? 1 : 0;
      }
      ended = done == std::ssize(ranks_);
      while (progress()) moved = true;
    }
    for (at_ = 0; at_ < std::ssize(ranks_); ++at_) {
      at_step_ = steps().size();
      for (const Posted& p : rank().posted)
        if (!p.waited) fail("exchange {} ({}) is not waited for", p.exchange->id, p.exchange->what);
    }
    at_ = 0;
  }
  const std::vector<Step>& steps() const { return plan_.ranks[at_].steps(pass_); }
  void start_pass() {
    Rank& r = rank();
    r.posted.clear();
    r.adding.clear();
    r.over = r.step = at_step_ = 0;
    if (pass_ == Pass::forward) r.memory.clear();
    for (const ArrayKind kind : {ArrayKind::q, ArrayKind::kv, ArrayKind::d_out}) {
      if (pass_ == Pass::forward && kind == ArrayKind::d_out) continue;
      const PlanArray& a = array(own(kind));
      Cell input;
      input.written = true;
      r.memory[a.storage] = {own(kind), 0, std::vector<Cell>(places(own(kind)), input)};
    }
  }
  /// Executes steps of one rank up to a Wait that cannot complete yet.
  void advance() {
    Rank& r = rank();
    for (; r.step < steps().size(); ++r.step) {
      at_step_ = r.step;
      const Step& s = steps()[r.step];
      if (const auto* w = std::get_if<step::Wait>(&s)) {
        if (!wait(w->id)) return;
      } else {
        std::visit(
            [&](const auto& x) {
              if constexpr (!std::is_same_v<std::decay_t<decltype(x)>, step::Wait>) (*this)(x);
            },
            s);
      }
    }
  }
  void fail_deadlock() {
    for (at_ = 0; at_ < std::ssize(ranks_); ++at_)
      if (rank().step < steps().size()) {
        at_step_ = rank().step;
        fail("waits for ever");
      }
  }
  void check_terms(int index, int64_t row, int64_t head, std::vector<int64_t> want) {
    std::vector<int64_t> got = read(index, row, head).terms;
    std::sort(got.begin(), got.end());
    if (got != want)
      fail("{} of slot {}, head {} has terms {}, not {}", name_of(array(index).kind),
           slots(index)[row], head, fmt::join(got, " "), fmt::join(want, " "));
  }
  void check_every_row_once(const std::map<std::pair<int64_t, int64_t>, int>& seen,
                            const char* what) {
    size_t rows = 0;
    for (size_t slot = 0; slot < keys_.size(); ++slot)
      if (!keys_[slot].empty()) ++rows;
    const size_t want = rows * static_cast<size_t>(problem_.heads.heads);
    if (seen.size() != want) fail("{} of {} rows and heads, not {}", what, seen.size(), want);
    for (const auto& [place, times] : seen)
      if (times != 1)
        fail("{} of slot {}, head {} {} times", what, place.first, place.second, times);
  }
  void check_forward() {
    std::map<std::pair<int64_t, int64_t>, int> final_rows;
    for (at_ = 0; at_ < std::ssize(ranks_); ++at_) {
      const int stats = plan_.ranks[at_].stats;
      for (const int index : {own(ArrayKind::out), stats})
        each_cell(index, [&](int64_t row, int64_t head) {
          const int64_t slot = slots(index)[row];
          check_terms(index, row, head, keys_[slot]);
          if (!cell(index, row, head).finished) fail("array {} is not finished", index);
          if (index == stats && !keys_[slot].empty()) ++final_rows[{slot, head}];
        });
    }
    at_ = 0;
    check_every_row_once(final_rows, "statistics");
  }
  void check_backward() {
    for (at_ = 0; at_ < std::ssize(ranks_); ++at_) {
      each_cell(own(ArrayKind::d_q), [&](int64_t row, int64_t head) {
        const int64_t slot = slots(own(ArrayKind::d_q))[row];
        check_terms(own(ArrayKind::d_q), row, head, keys_[slot]);
      });
      each_cell(own(ArrayKind::d_kv), [&](int64_t row, int64_t head) {
        const int64_t slot = slots(own(ArrayKind::d_kv))[row];
        const int64_t group = problem_.heads.group();
        std::vector<int64_t> want;
        for (const int64_t q : queries_[slot])
          for (int64_t h = head * group; h < (head + 1) * group; ++h)
            want.push_back(q * problem_.heads.heads + h);
        check_terms(own(ArrayKind::d_kv), row, head, want);
      });
    }
    at_ = 0;
    if (complete_sinks_ != 0 && (complete_sinks_ != std::ssize(ranks_) || !sinks_.empty()))
      fail("sinks are complete on {} ranks only", complete_sinks_);
    if (complete_sinks_ == 0) check_every_row_once(sinks_, "sinks");
  }

  const Plan& plan_;
  const AttentionProblem& problem_;
  std::vector<Rank> ranks_;
  int64_t slots_ = 0;                                 // of the stream, with padding
  std::vector<std::vector<int64_t>> keys_, queries_;  // [slots] of a query, of a key
  std::map<std::pair<int, int>, Queue> queues_;       // from, to
  std::map<std::pair<int64_t, int64_t>, int> sinks_;
  int complete_sinks_ = 0;
  Pass pass_ = Pass::forward;
  int at_ = 0;
  size_t at_step_ = 0;
};

/// The first fault of the plans of all ranks; "" if there is none.
inline std::string plan_fault(const Plan& plan, const AttentionProblem& problem,
                              const SegmentBounds& bounds) {
  return PlanMachine(plan, problem, bounds).fault();
}

}  // namespace gyre::test
