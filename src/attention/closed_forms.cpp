#include "attention/closed_forms.hpp"

#include <algorithm>
#include <map>

#include "sharding/layouts.hpp"

namespace gyre {
namespace {

std::map<int64_t, int64_t> lengths_of(const Layout& layout) {
  std::map<int64_t, int64_t> lengths;
  for (const Shard& shard : layout.shards)
    for (const Fragment& f : shard.fragments) lengths[f.segment] += f.length;
  return lengths;
}

/// The sequences of a layout, which are its segments that have tokens, and the number of the first.
struct NumberedSequences : EqualSequences {
  int64_t first_segment = 0;
};

std::optional<NumberedSequences> equal_sequences(const Layout& layout) {
  NumberedSequences result;
  for (const auto& [segment, length] : lengths_of(layout)) {
    if (result.count > 0 && length != result.length) return std::nullopt;
    if (result.count == 0) result.first_segment = segment;
    ++result.count;
    result.length = length;
  }
  if (result.count * result.length != layout.stream_slots) return std::nullopt;
  return result;
}

/// Visible pairs of the queries in slots [begin, end) of a stream of equal sequences.
int64_t range_pairs(int64_t begin, int64_t end, const EqualSequences& all,
                    const DocumentMask& mask) {
  const auto up_to = [&](int64_t slot) {
    slot = std::min(slot, all.count * all.length);
    return slot / all.length * mask.pairs(all.length) + mask.pairs(slot % all.length);
  };
  return up_to(end) - up_to(begin);
}

/// Visible pairs of the tokens of a run within one sequence: under a causal mask token p sees min(p
/// + 1, window) keys.
int64_t strided_pairs(const SlotRun& run, const NumberedSequences& all, const MaskRule& mask) {
  if (mask.kind == MaskKind::full) return run.length * all.length;
  if (mask.kind == MaskKind::regions) {
    const DocumentMask document(mask, all.first_segment, all.length);
    int64_t pairs = 0;
    for (int64_t i = 0; i < run.length; ++i)
      pairs += document.keys_of(run.start.value() + i * run.stride);
    return pairs;
  }
  const int64_t first = run.start.value();
  int64_t whole = run.length;  // tokens that see all earlier tokens
  if (mask.window > 0)
    whole = std::clamp<int64_t>(ceil_div(mask.window - first, run.stride), 0, run.length);
  return whole * (first + 1) + run.stride * (whole * (whole - 1) / 2) +
         (run.length - whole) * mask.window;
}

int64_t run_pairs(const SlotRun& run, const NumberedSequences& all, const MaskRule& mask) {
  const int64_t begin = run.start.value();
  return run.stride == 1
             ? range_pairs(begin, begin + run.length, all, {mask, all.first_segment, all.length})
             : strided_pairs(run, all, mask);
}

}  // namespace

int64_t pairs_of_all_ranks(const AttentionProblem& problem) {
  int64_t pairs = 0;
  for (const auto& [segment, length] : lengths_of(*problem.layout))
    pairs += visible_pairs(length, problem.mask, segment);
  return pairs;
}

std::optional<int64_t> visible_pairs_of(const AttentionProblem& problem, int rank) {
  const Layout& layout = problem.layout_of(ArrayKind::q);
  const auto all = equal_sequences(layout);
  if (!all) return std::nullopt;
  if (all->count == 0) return 0;
  if (problem.mask.kind == MaskKind::regions && all->count > 1) return std::nullopt;
  const LayoutKind* kind = kind_of(layout);
  const auto owned = kind == nullptr ? std::nullopt : kind->owned(layout, *all, rank);
  if (!owned) return std::nullopt;
  // Positions of the last queries of a longer sequence begin where those of the others end.
  NumberedSequences whole = *all;
  if (problem.query_layout != nullptr)
    whole.length = lengths_of(*problem.layout)[all->first_segment];
  int64_t pairs = 0;
  for (SlotRun run : owned->runs) {
    run.start = run.start + (whole.length - all->length);
    pairs += run_pairs(run, whole, problem.mask);
  }
  return owned->in_each_sequence ? all->count * pairs : pairs;
}

std::optional<double> needed_share(const AttentionProblem& problem) {
  const Layout& layout = *problem.layout;
  const auto all = equal_sequences(layout);
  if (!all || all->count != 1 || !problem.mask.plain_causal() || layout.cp() == 1 ||
      all->length % layout.cp() != 0)
    return std::nullopt;
  const LayoutKind* kind = kind_of(layout);
  return kind == nullptr ? std::nullopt : kind->needed_share(layout, all->length);
}

}  // namespace gyre
