#include "attention/schedules/builder/plan_builder.hpp"

#include <algorithm>
#include <array>

namespace gyre {
namespace {

/// The runs of slots in rows `range` of an array that consists of the runs `rows`.
std::vector<RankRows> part_of(const std::vector<RankRows>& rows, RowRange range) {
  std::vector<RankRows> part;
  int64_t row = 0;
  for (const RankRows& run : rows) {
    const int64_t first = std::max<int64_t>(0, range.begin - row);
    const int64_t last = std::min(run.length, range.begin + range.length - row);
    if (first < last) part.push_back({run.rank, run.begin + first, last - first});
    row += run.length;
  }
  return part;
}

}  // namespace

PlanBuilder::PlanBuilder(const AttentionProblem& problem, int rank) : problem_(problem) {
  plan_.rank = rank;
  for (int kind = 0; kind < array_kinds; ++kind) {
    const auto k = static_cast<ArrayKind>(kind);
    plan_.arrays.push_back({k, rows_of(rank, k), all_heads(k), kind});
  }
}

void append(std::vector<RankRows>& rows, const RankRows& next) {
  const bool goes_on = !rows.empty() && rows.back().rank == next.rank &&
                       rows.back().begin + rows.back().length == next.begin;
  if (goes_on)
    rows.back().length += next.length;
  else
    rows.push_back(next);
}

std::vector<RankRows> PlanBuilder::rows_of(int rank, ArrayKind kind) const {
  return {{rank, LocalToken(0), problem_.layout_of(kind).shard(rank).slots}};
}

std::vector<RankRows> PlanBuilder::rows_in_order(const std::vector<int>& ranks,
                                                 ArrayKind kind) const {
  std::vector<std::pair<GlobalToken, RankRows>> runs;
  for (const int rank : ranks)
    for (const SlotRun& run : problem_.layout_of(kind).shard(rank).runs)
      runs.push_back({run.start, {rank, run.local_begin, run.length}});
  std::ranges::stable_sort(runs, {}, [](const auto& run) { return run.first; });
  std::vector<RankRows> rows;
  for (const auto& [start, next] : runs)
    if (next.length > 0) append(rows, next);
  return rows;
}

HeadRange PlanBuilder::all_heads(ArrayKind kind) const {
  return {0, has_keys(kind) ? problem_.heads.kv_heads : problem_.heads.heads};
}

int PlanBuilder::add_array(ArrayKind kind, std::vector<RankRows> rows, HeadRange heads,
                           int storage) {
  plan_.arrays.push_back({kind, std::move(rows), heads, storage < 0 ? new_storage() : storage});
  return static_cast<int>(plan_.arrays.size()) - 1;
}

int PlanBuilder::exchange(std::string what, std::vector<Message> sends, std::vector<Message> recvs,
                          Transport transport, std::vector<int> group) {
  const auto tidy = [](std::vector<Message>& messages) {
    for (Message& m : messages)
      std::erase_if(m.slices, [](const Slice& s) { return s.rows == 0 || s.heads.count == 0; });
    std::erase_if(messages, [](const Message& m) { return m.slices.empty(); });
  };
  tidy(sends);
  tidy(recvs);
  if (sends.empty() && recvs.empty()) return -1;
  if (transport == Transport::messages) group.clear();
  add(step::Exchange{exchanges_, std::move(what), std::move(sends), std::move(recvs), transport,
                     std::move(group)});
  return exchanges_++;
}

int PlanBuilder::exchange_pair(std::string what, Message send, Message recv) {
  const auto only = [](Message& message) {
    std::vector<Message> messages;
    messages.push_back(std::move(message));
    return messages;
  };
  return exchange(std::move(what), only(send), only(recv));
}

void PlanBuilder::wait(int id) {
  if (id >= 0) add(step::Wait{id});
}

void PlanBuilder::clear(int array) {
  add(step::Clear{array});
}

step::Compute PlanBuilder::step_of(const ArraySet& set, int kv, int d_kv) const {
  step::Compute step;
  step.q = set.q;
  step.kv = kv;
  step.stats = set.stats;
  step.kv_heads = array(kv).heads;
  if (pass_ == Pass::forward) {
    step.out = set.out;
  } else {
    step.d_out = set.d_out;
    step.d_q = set.d_q;
    step.d_kv = d_kv;
  }
  return step;
}

void PlanBuilder::compute(const ArraySet& set, int kv, int d_kv) {
  compute(step_of(set, kv, d_kv));
}

void PlanBuilder::compute(const ArraySet& set, int kv, int d_kv,
                          const std::vector<RowRange>& keys) {
  compute(step_of(set, kv, d_kv), Trim::both, keys);
}

void PlanBuilder::compute(step::Compute step, Trim trim) {
  const int64_t tokens = array(step.kv).tokens();
  compute(std::move(step), trim, std::array{RowRange{0, tokens}});
}

void PlanBuilder::compute(step::Compute step, Trim trim, std::span<const RowRange> keys) {
  if (!wanted()) return;
  if (query_heads_of(array(step.q).heads, step.kv_heads, problem_.heads).count == 0) return;
  const Layout& layout = problem_.layout_of(ArrayKind::kv);
  const PlanArray& kv = array(step.kv);
  if (queries_of_ != step.q) {
    queries_ = shard_of(problem_.layout_of(ArrayKind::q), array(step.q).rows);
    queries_of_ = step.q;
  }
  for (const RowRange& range : keys) {
    const bool all = range.begin == 0 && range.length == kv.tokens();
    std::vector<Rectangle> seen = intersect(
        queries_, shard_of(layout, all ? kv.rows : part_of(kv.rows, range)), problem_.mask, trim);
    for (Rectangle& r : seen) r.k_begin += range.begin;
    if (step.rectangles.empty())
      step.rectangles = std::move(seen);
    else
      step.rectangles.insert(step.rectangles.end(), seen.begin(), seen.end());
  }
  if (keys.size() > 1) std::ranges::stable_sort(step.rectangles, {}, &Rectangle::q_begin);
  if (!step.rectangles.empty()) add(std::move(step));
}

void PlanBuilder::finish(const ArraySet& set) {
  add(step::Finish{set.out, set.stats});
}

void PlanBuilder::delta(const ArraySet& set) {
  add(step::Delta{set.out, set.stats, set.d_out});
}

void PlanBuilder::sink_gradient(int stats, bool complete) {
  add(step::SinkGradient{stats, complete});
}

Slice PlanBuilder::whole(int index, bool add) const {
  return {index, 0, array(index).tokens(), array(index).heads, add};
}

std::vector<Slice> PlanBuilder::slices_of(ArrayKind kind, const std::vector<RankRows>& runs,
                                          bool add) const {
  std::vector<Slice> slices;
  for (const RankRows& run : runs)
    slices.push_back({own(kind), run.begin.value(), run.length, all_heads(kind), add});
  return slices;
}

std::vector<Slice> PlanBuilder::slices_of(int index) const {
  std::vector<Slice> slices;
  int64_t row = 0;
  for (const RankRows& run : array(index).rows) {
    slices.push_back({index, row, run.length, array(index).heads});
    row += run.length;
  }
  return slices;
}

RankPlan PlanBuilder::take(int stats) {
  plan_.stats = stats;
  return std::move(plan_);
}

std::vector<RankRows> needed_rows(const AttentionProblem& problem, int reader, int owner) {
  const auto shard = [&](int rank, ArrayKind kind) {
    const Layout& layout = problem.layout_of(kind);
    return shard_of(layout, {{rank, LocalToken(0), layout.shard(rank).slots}});
  };
  std::vector<RankRows> seen;
  for (const Rectangle& r :
       intersect(shard(reader, ArrayKind::q), shard(owner, ArrayKind::kv), problem.mask))
    seen.push_back({owner, LocalToken(r.k_begin), r.k_length});
  std::sort(seen.begin(), seen.end(),
            [](const RankRows& a, const RankRows& b) { return a.begin < b.begin; });
  std::vector<RankRows> rows;
  for (const RankRows& run : seen) {
    if (rows.empty() || rows.back().begin + rows.back().length < run.begin) {
      rows.push_back(run);
    } else {
      const int64_t reach = run.begin - rows.back().begin + run.length;
      rows.back().length = std::max(rows.back().length, reach);
    }
  }
  return rows;
}

}  // namespace gyre
