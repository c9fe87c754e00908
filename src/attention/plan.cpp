#include "attention/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

namespace gyre {

const char* name_of(ArrayKind kind) {
  constexpr std::array names = {"q", "kv", "out", "stats", "d_out", "d_q", "d_kv"};
  static_assert(names.size() == array_kinds);
  return names[static_cast<size_t>(kind)];
}

const char* name_of(Transport transport) {
  constexpr std::array names = {"messages", "allgather", "reduce_scatter", "alltoall"};
  return names.at(static_cast<size_t>(transport));
}

int64_t PlanArray::tokens() const {
  int64_t sum = 0;
  for (const RankRows& run : rows) sum += run.length;
  return sum;
}

namespace {

/// Appends a fragment. Extends the last fragment if the new one continues it: keys of a document on
/// several ranks become one run where their rows are adjacent.
void append(std::vector<Fragment>& fragments, const Fragment& next) {
  if (!fragments.empty()) {
    Fragment& last = fragments.back();
    const auto consecutive = [](const Fragment& f) { return f.stride == 1 || f.length == 1; };
    if (last.segment == next.segment && last.start + last.length == next.start &&
        last.local_begin + last.length == next.local_begin && consecutive(last) &&
        consecutive(next)) {
      last.stride = 1;
      last.length += next.length;
      return;
    }
  }
  fragments.push_back(next);
}

}  // namespace

Shard shard_of(const Layout& layout, const std::vector<RankRows>& rows) {
  Shard shard;
  for (const RankRows& run : rows) {
    const auto& fragments = layout.shard(run.rank).fragments;
    const LocalToken end = run.begin + run.length;
    auto f = std::partition_point(fragments.begin(), fragments.end(), [&](const Fragment& x) {
      return x.local_begin + x.length <= run.begin;
    });
    for (; f != fragments.end() && f->local_begin < end; ++f) {
      const int64_t skipped = std::max<int64_t>(0, run.begin - f->local_begin);
      const int64_t last = std::min(f->length, end - f->local_begin);
      append(shard.fragments,
             {f->segment, f->start + skipped * f->stride, f->stride, last - skipped,
              LocalToken(shard.slots + (f->local_begin + skipped - run.begin))});
    }
    shard.slots += run.length;
  }
  return shard;
}

DType ElementTypes::stored(ArrayKind kind) const {
  switch (kind) {
    case ArrayKind::q:
    case ArrayKind::kv:
    case ArrayKind::d_out:
      return activations;
    case ArrayKind::out:
      return partial_out;
    case ArrayKind::d_q:
      return d_q;
    case ArrayKind::stats:
    case ArrayKind::d_kv:
      break;
  }
  return DType::f32;
}

DType ElementTypes::on_wire(ArrayKind kind) const {
  if (kind == ArrayKind::d_kv) return wire_d_kv;
  return kind == ArrayKind::stats ? DType::f32 : activations;
}

std::string name_of_dims(const HeadShape& shape) {
  if (shape.value_dim() == shape.head_dim) return std::to_string(shape.head_dim);
  return fmt::format("{} (values: {})", shape.head_dim, shape.value_dim());
}

int64_t plane_dim(ArrayKind kind, int64_t plane, const HeadShape& shape) {
  switch (kind) {
    case ArrayKind::stats:
      return 1;
    case ArrayKind::q:
    case ArrayKind::d_q:
      return shape.head_dim;
    case ArrayKind::out:
    case ArrayKind::d_out:
      return shape.value_dim();
    case ArrayKind::kv:
    case ArrayKind::d_kv:
      break;
  }
  return plane == 0 ? shape.head_dim : shape.value_dim();
}

int64_t row_elements(ArrayKind kind, int64_t heads, const HeadShape& shape) {
  int64_t elements = 0;
  for (int64_t p = 0; p < planes_of(kind); ++p) elements += heads * plane_dim(kind, p, shape);
  return elements;
}

bool sends_shared_keys_once(ArrayKind kind, int64_t heads, const HeadShape& shape) {
  return shape.shared_key_dim > 0 && heads > 1 && has_keys(kind);
}

int64_t message_elements(ArrayKind kind, int64_t heads, const HeadShape& shape) {
  const int64_t all = row_elements(kind, heads, shape);
  return sends_shared_keys_once(kind, heads, shape) ? all - (heads - 1) * shape.shared_key_dim
                                                    : all;
}

namespace {

/// Counts one list of steps.
class Counter {
 public:
  Counter(const RankPlan& plan, const HeadShape& heads, const ElementTypes& types)
      : plan_(plan), heads_(heads), types_(types), touched_(plan.arrays.size()) {}

  void operator()(const step::Exchange& s) {
    for (const Message& m : s.sends) {
      if (m.peer == plan_.rank) continue;
      if (s.transport == Transport::messages) ++count_.messages;
      for (const Slice& slice : m.slices) {
        touch(slice.array);
        count_.bytes_sent += wire_bytes(slice);
      }
    }
    if (s.transport != Transport::messages) ++count_.messages;
    for (const Message& m : s.recvs)
      for (const Slice& slice : m.slices) {
        touch(slice.array);
        if (m.peer != plan_.rank) count_.bytes_received += wire_bytes(slice);
      }
    const MessageCopies made = copies_of(s, plan_, heads_, types_);
    const int64_t copies = made.sent + made.received;
    if (copies > 0) copies_[s.id] = copies;
    copies_now_ += copies;
    max_copies_ = std::max(max_copies_, copies_now_);
  }
  void operator()(const step::Wait& s) {
    const auto found = copies_.find(s.id);
    if (found == copies_.end()) return;
    copies_now_ -= found->second;
    copies_.erase(found);
  }
  void operator()(const step::Clear& s) { touch(s.array); }
  void operator()(const step::Compute& s) {
    for (const int array : {s.q, s.kv, s.stats, s.out, s.d_out, s.d_q, s.d_kv})
      if (array >= 0) touch(array);
    if (s.out >= 0 || s.d_q >= 0) count_.pairs += total_pairs(s.rectangles) * query_heads(s).count;
  }
  void operator()(const step::Merge& s) {
    for (const int array : {s.out, s.stats}) touch(array);
    for (const auto& [out, stats] : s.partials)
      for (const int array : {out, stats}) touch(array);
  }
  void operator()(const step::Finish& s) {
    for (const int array : {s.out, s.stats}) touch(array);
  }
  void operator()(const step::Delta& s) {
    for (const int array : {s.out, s.stats, s.d_out}) touch(array);
  }
  void operator()(const step::SinkGradient& s) { touch(s.stats); }

  PlanCount result() const {
    PlanCount total = count_;
    total.transient_bytes = max_copies_;
    for (const auto& [storage, bytes] : storages_) total.transient_bytes += bytes;
    return total;
  }

 private:
  const PlanArray& array(int index) const { return plan_.arrays[index]; }
  HeadRange query_heads(const step::Compute& s) const {
    return query_heads_of(array(s.q).heads, s.kv_heads, heads_);
  }
  int64_t wire_bytes(const Slice& slice) const {
    return gyre::wire_bytes(array(slice.array).kind, slice, heads_, types_);
  }
  void touch(int index) {
    // stored_bytes() loops over runs of rows, of which an array may have as many as tokens.
    if (index < array_kinds || touched_[index]) return;
    touched_[index] = true;
    const PlanArray& a = array(index);
    int64_t& bytes = storages_[a.storage];
    bytes = std::max(bytes, stored_bytes(a, heads_, types_));
  }

  const RankPlan& plan_;
  const HeadShape& heads_;
  const ElementTypes& types_;
  PlanCount count_;
  std::map<int, int64_t> copies_;    ///< [exchange] bytes of copies in progress
  std::map<int, int64_t> storages_;  ///< [storage] bytes of its largest array
  std::vector<bool> touched_;        ///< [array]
  int64_t copies_now_ = 0, max_copies_ = 0;
};

}  // namespace

HeadRange query_heads_of(HeadRange q, HeadRange kv, const HeadShape& heads) {
  const int64_t group = heads.group();
  const int64_t begin = std::max(q.begin, kv.begin * group);
  const int64_t end = std::min(q.end(), kv.end() * group);
  return {begin, std::max<int64_t>(0, end - begin)};
}

bool travels_as_it_lies(const PlanArray& array, const Slice& slice, const HeadShape& heads,
                        const ElementTypes& types) {
  return slice.heads == array.heads && types.stored(array.kind) == types.on_wire(array.kind) &&
         !sends_shared_keys_once(array.kind, slice.heads.count, heads);
}

MessageCopies copies_of(const step::Exchange& exchange, const RankPlan& plan,
                        const HeadShape& heads, const ElementTypes& types) {
  const auto array = [&](const Slice& slice) -> const PlanArray& {
    return plan.arrays[slice.array];
  };
  const auto lies = [&](const Slice& slice) {
    return travels_as_it_lies(array(slice), slice, heads, types);
  };
  const auto bytes = [&](const Slice& slice) {
    return wire_bytes(array(slice).kind, slice, heads, types);
  };
  const auto sum = [&](const std::vector<Message>& messages, auto is_copied) {
    int64_t total = 0;
    for (const Message& m : messages)
      for (const Slice& slice : m.slices)
        if (m.peer != plan.rank && is_copied(slice)) total += bytes(slice);
    return total;
  };
  const auto copied = [&](const Slice& slice) { return slice.add || !lies(slice); };
  switch (exchange.transport) {
    case Transport::messages:
      return {sum(exchange.sends, copied), sum(exchange.recvs, copied)};
    case Transport::all_to_all: {
      const auto all = [](const Slice&) { return true; };
      return {sum(exchange.sends, all), sum(exchange.recvs, all)};
    }
    case Transport::all_gather: {
      const Slice &sent = exchange.sends.front().slices.front(),
                  &received = exchange.recvs.front().slices.front();
      const int64_t blocks = std::ssize(exchange.group);
      return {lies(sent) ? 0 : bytes(sent), lies(received) ? 0 : blocks * bytes(received)};
    }
    case Transport::reduce_scatter: {
      const Slice &sent = exchange.sends.front().slices.front(),
                  &summed = exchange.recvs.front().slices.front();
      const int64_t blocks = std::ssize(exchange.group);
      return {lies(sent) ? 0 : blocks * bytes(sent), bytes(summed)};
    }
  }
  return {};
}

int64_t wire_bytes(ArrayKind kind, const Slice& slice, const HeadShape& heads,
                   const ElementTypes& types) {
  return slice.rows * message_elements(kind, slice.heads.count, heads) *
         size_of(types.on_wire(kind));
}

int64_t stored_bytes(const PlanArray& array, const HeadShape& heads, const ElementTypes& types) {
  return array.tokens() * row_elements(array.kind, array.heads.count, heads) *
         size_of(types.stored(array.kind));
}

int64_t plan_bytes(const RankPlan& plan) {
  size_t bytes = 0;
  const auto add = [&bytes](const auto& list) { bytes += list.capacity() * sizeof(*list.data()); };
  add(plan.arrays);
  for (const PlanArray& array : plan.arrays) add(array.rows);
  for (const std::vector<Step>* steps : {&plan.forward, &plan.backward}) {
    add(*steps);
    for (const Step& step : *steps) {
      if (const auto* compute = std::get_if<step::Compute>(&step)) add(compute->rectangles);
      if (const auto* merge = std::get_if<step::Merge>(&step)) add(merge->partials);
      if (const auto* exchange = std::get_if<step::Exchange>(&step))
        for (const auto* messages : {&exchange->sends, &exchange->recvs}) {
          add(*messages);
          for (const Message& message : *messages) add(message.slices);
        }
    }
  }
  return bytes;
}

std::string name_of_keys(const RankPlan& plan, const step::Compute& compute) {
  const std::vector<RankRows>& rows = plan.arrays[compute.kv].rows;
  const bool one = !rows.empty() && std::all_of(rows.begin(), rows.end(), [&](const RankRows& run) {
    return run.rank == rows[0].rank;
  });
  return one ? fmt::format("keys of rank {}", rows[0].rank) : std::string("keys of several ranks");
}

PlanCount count(const RankPlan& plan, Pass pass, const HeadShape& heads,
                const ElementTypes& types) {
  Counter counter(plan, heads, types);
  for (const Step& s : plan.steps(pass)) std::visit(counter, s);
  return counter.result();
}

}  // namespace gyre
