// What schedules move, against the tables that people choose by: bytes of the usual shapes, links
// inside and between groups, the busiest rank, windows; and the steps of rings, pair by pair.

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "attention_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::AttentionCase;
using test::full_bounds;
using test::layout_case;
using test::shape_of;
using Longs = std::vector<int64_t>;

TEST(ClosedForm, IsWhatEveryScheduleCountsOn64Ranks) {
  constexpr int cp = 64;
  for (const char* kind :
       {"contiguous", "contiguous-documents", "dual-chunk-swap", "zigzag", "striped", "balanced"})
    for (const MaskRule& mask : {MaskRule{}, MaskRule{MaskKind::causal, 2}}) {
      AttentionCase c;
      c.layout = layout_case(kind, test::bounds_of({384, 5, 100}, {384, 128, 128}), cp);
      c.heads = shape_of(6, 2);
      c.mask = mask;
      const AttentionProblem problem = c.problem();
      const ElementTypes types{DType::bf16, DType::f32, DType::f32, DType::bf16};
      for (const Schedule& schedule : schedules()) {
        if (!schedule.why_not(problem).empty()) continue;
        for (const int rank : {0, 1, 31, 63})
          for (const Pass pass : {Pass::forward, Pass::backward}) {
            SCOPED_TRACE(
                fmt::format("{}, {}, rank {}, {}", schedule.name, kind, rank, name_of(pass)));
            const PlanCount counted =
                count(plan_rank(schedule, problem, rank), pass, c.heads, types);
            const ClosedForm form = schedule.closed_form({problem, types, rank, pass});
            EXPECT_EQ(counted.messages, form.messages);
            EXPECT_EQ(counted.bytes_sent, form.bytes_sent);
            EXPECT_EQ(counted.bytes_received, form.bytes_received);
            EXPECT_EQ(counted.transient_bytes, form.transient_bytes);
          }
      }
    }
}

/// Bytes that rank 0 sends forward and backward, in units of N · D · e.
double volume(const char* schedule, const HeadShape& heads, int cp, DType gradients) {
  constexpr int64_t tokens = 2;
  AttentionCase c;
  c.layout = layout_case("dual-chunk-swap", full_bounds({tokens * cp}), cp);
  c.heads = heads;
  const ElementTypes types{DType::bf16, DType::bf16, DType::bf16, gradients};
  const RankPlan plan = plan_rank(find_schedule(schedule), c.problem(), 0);
  const int64_t bytes = count(plan, Pass::forward, heads, types).bytes_sent +
                        count(plan, Pass::backward, heads, types).bytes_sent;
  return static_cast<double>(bytes) / static_cast<double>(tokens * cp * heads.head_dim * 2);
}

TEST(Volume, OfTheUsualShapesDecidesBetweenGatherAndAllToAll) {
  struct Row {
    int64_t heads, kv_heads;
    int cp;
    double gather, gather_wide, all_to_all;  // wide: gradients travel in f32
  };
  const std::vector<Row> table = {
      {64, 8, 4, 36, 48, 54},    {64, 8, 8, 42, 56, 31.5},  {64, 8, 16, 45, 60, 18.75},
      {32, 8, 4, 36, 48, 30},    {32, 8, 8, 42, 56, 17.5},  {32, 8, 16, 45, 60, 11.25},
      {32, 32, 4, 144, 192, 48}, {32, 32, 8, 168, 224, 28}, {32, 32, 16, 180, 240, 15},
      {16, 1, 4, 4.5, 6, 15},    {16, 1, 8, 5.25, 7, 10.5}, {16, 1, 16, 5.625, 7.5, 7.5}};
  for (const Row& x : table) {
    SCOPED_TRACE(fmt::format("{} heads of {}, cp {}", x.heads, x.kv_heads, x.cp));
    const HeadShape heads = shape_of(x.heads, x.kv_heads, 4);
    EXPECT_DOUBLE_EQ(volume("all-gather", heads, x.cp, DType::bf16), x.gather);
    EXPECT_DOUBLE_EQ(volume("all-gather", heads, x.cp, DType::f32), x.gather_wide);
    EXPECT_DOUBLE_EQ(volume("all-gather-strided", heads, x.cp, DType::f32), x.gather_wide);
    EXPECT_DOUBLE_EQ(volume("all-to-all", heads, x.cp, DType::bf16), x.all_to_all);
    // A ring that turns round saves a hop of KV, 2/cp · H_kv; one that does not needs one more hop
    // of gradients than the gather's reduce-scatter.
    const double hop = 2.0 * static_cast<double>(x.kv_heads) / x.cp;
    EXPECT_DOUBLE_EQ(volume("ring", heads, x.cp, DType::bf16), x.gather - hop);
    EXPECT_DOUBLE_EQ(volume("ring", heads, x.cp, DType::f32), x.gather_wide - hop);
    EXPECT_DOUBLE_EQ(volume("ring-forward", heads, x.cp, DType::f32), x.gather_wide + 2 * hop);
  }
}

/// Bytes and messages that a rank sends inside its group of `inner` ranks, and out of it.
struct Links {
  int64_t inside = 0, outside = 0, messages_inside = 0, messages_outside = 0;
};
Links links_of(const RankPlan& plan, Pass pass, const HeadShape& heads, int inner,
               const ElementTypes& types) {
  Links links;
  for (const Step& s : plan.steps(pass)) {
    const auto* exchange = std::get_if<step::Exchange>(&s);
    if (exchange == nullptr) continue;
    for (const Message& m : exchange->sends) {
      if (m.peer == plan.rank) continue;
      const bool inside = m.peer / inner == plan.rank / inner;
      ++(inside ? links.messages_inside : links.messages_outside);
      for (const Slice& slice : m.slices)
        (inside ? links.inside : links.outside) +=
            wire_bytes(plan.arrays[slice.array].kind, slice, heads, types);
    }
  }
  return links;
}

TEST(Volume, HierarchicalSendsOnlyTheOuterRingBetweenGroups) {
  constexpr int64_t tokens = 4;
  const ElementTypes types{DType::bf16, DType::bf16, DType::bf16, DType::f32};
  for (const HeadShape& heads : {shape_of(16, 8), shape_of(16, 2), shape_of(8, 1)})
    for (const auto& [cp, inner] :
         std::vector<std::pair<int, int>>{{8, 2}, {8, 4}, {12, 2}, {8, 8}, {6, 1}}) {
      if (heads.heads % inner != 0) continue;
      SCOPED_TRACE(fmt::format("cp {}, inner {}, {} KV heads", cp, inner, heads.kv_heads));
      AttentionCase c;
      c.layout = layout_case("dual-chunk-swap", full_bounds({tokens * cp}), cp);
      c.heads = heads;
      c.options.inner = inner;
      const int outer = cp / inner;
      // q and k of one rank; a group's block for one rank's heads, replicated if need be.
      const int64_t row = tokens * heads.head_dim * 2,
                    kv_read = std::max<int64_t>(1, heads.kv_heads / inner);
      const int64_t block = 2 * row * inner * kv_read;
      const int64_t exchanged = row * (heads.heads / inner) * (inner - 1);  // Q, O, dO, dQ each
      const int64_t kv_there = 2 * row * kv_read * (inner - 1);
      for (int r = 0; r < cp; ++r) {
        const RankPlan plan = plan_rank(find_schedule("all-to-all-ring"), c.problem(), r);
        const Links forward = links_of(plan, Pass::forward, heads, inner, types);
        EXPECT_EQ(forward.inside, 2 * exchanged + kv_there);
        EXPECT_EQ(forward.outside, (outer - 1) * block);
        EXPECT_EQ(forward.messages_inside, 3 * (inner - 1));
        EXPECT_EQ(forward.messages_outside, outer - 1);
        const Links backward = links_of(plan, Pass::backward, heads, inner, types);
        // dKV in f32 has twice the bytes; the ring has turned round.
        EXPECT_EQ(backward.inside, 2 * exchanged + 2 * kv_there);
        EXPECT_EQ(backward.outside, std::max(0, outer - 2) * block + (outer - 1) * 2 * block);
        EXPECT_EQ(backward.messages_inside, 2 * (inner - 1));
        EXPECT_EQ(backward.messages_outside, outer > 2 ? outer : outer - 1);
      }
    }
}

TEST(Volume, GroupCastDoesNotShortenTheBusiestLinkOfDualChunkSwap) {
  for (int cp = 2; cp <= 8; ++cp) {
    AttentionCase c;
    c.layout = layout_case("dual-chunk-swap", full_bounds({8 * cp}), cp);
    c.heads = shape_of(4, 2);
    const int64_t block = 8 * row_elements(ArrayKind::kv, 2, c.heads) * 4;
    int64_t sent = 0;
    for (int r = 0; r < cp; ++r) {
      const PlanCount counted =
          count(plan_rank(find_schedule("group-cast"), c.problem(), r), Pass::forward, c.heads, {});
      sent += counted.bytes_sent;
      if (r == 0) {
        EXPECT_EQ(counted.bytes_received, (cp - 1) * block) << cp;
      }
      if (r == cp - 1) {
        EXPECT_EQ(counted.bytes_sent, (cp - 1) * block) << cp;
      }
    }
    EXPECT_EQ(4 * sent, 3 * cp * (cp - 1) * block) << cp;
  }
}

TEST(Volume, AHaloMovesTheWindowAndNotTheSequence) {
  // A window of 1024 over 2^20 tokens on 64 ranks: a ring sends some 505 times the bytes.
  AttentionCase c;
  c.layout = layout_case("dual-chunk-swap", full_bounds({int64_t{1} << 20}), 64);
  c.heads = shape_of(4, 2);
  c.mask = {MaskKind::causal, 1024};
  const auto sent = [&](const char* schedule, int rank) {
    return count(plan_rank(find_schedule(schedule), c.problem(), rank), Pass::forward, c.heads, {})
        .bytes_sent;
  };
  const int64_t row = row_elements(ArrayKind::kv, 2, c.heads) * 4;
  EXPECT_EQ(sent("halo", 30), 2 * 1023 * row);  // w - 1 rows to either neighbour
  EXPECT_EQ(sent("halo", 0), 1023 * row);       // its other chunk ends the sequence
  EXPECT_EQ(sent("ring", 30), int64_t{63} * 16384 * row);
  EXPECT_EQ(sent("ring", 30) / sent("halo", 30), 504);  // 504.5
  EXPECT_EQ(sent("group-cast", 30), sent("halo", 30));
  // Contiguous: the tail of the rank before.
  c.layout = layout_case("contiguous", full_bounds({int64_t{1} << 20}), 64);
  EXPECT_EQ(sent("halo", 0), 1023 * row);
  EXPECT_EQ(sent("halo", 30), 1023 * row);
  EXPECT_EQ(sent("halo", 63), 0);
}

/// Pairs of each step of a causal ring forward, 0 where nothing is computed, by distance i: the
/// keys of rank r - i.
Longs pairs_by_step(const Layout& layout, int rank) {
  Longs pairs(static_cast<size_t>(layout.cp()), 0);
  const HeadShape heads = shape_of(1, 1);
  const RankPlan plan = plan_rank(find_schedule("ring"), {&layout, heads, {}, {}}, rank);
  for (const Step& s : plan.forward)
    if (const auto* compute = std::get_if<step::Compute>(&s)) {
      const int owner = plan.arrays[compute->kv].rows.front().rank;
      pairs[(rank - owner + layout.cp()) % layout.cp()] += total_pairs(compute->rectangles);
    }
  return pairs;
}

TEST(RingSteps, AreFullOrIdleUnderContiguousAndTrianglesUnderStriped) {
  constexpr int cp = 5;
  constexpr int64_t local = 6, chunk = local / 2;
  for (int r = 0; r < cp; ++r) {
    Longs contiguous, striped, swapped;
    for (int i = 0; i < cp; ++i) {
      const bool before = i > 0 && i <= r, diagonal = i == 0;
      contiguous.push_back(diagonal ? local * (local + 1) / 2 : before ? local * local : 0);
      striped.push_back(diagonal || before ? local * (local + 1) / 2 : local * (local - 1) / 2);
      swapped.push_back(2 * chunk * chunk + (diagonal ? chunk : 0));
    }
    const auto bounds = full_bounds({local * cp});
    EXPECT_EQ(pairs_by_step(layout_case("contiguous", bounds, cp).layout, r), contiguous);
    EXPECT_EQ(pairs_by_step(layout_case("striped", bounds, cp).layout, r), striped);
    EXPECT_EQ(pairs_by_step(layout_case("dual-chunk-swap", bounds, cp).layout, r), swapped);
  }
}

/// Storages of received arrays of a kind.
size_t storages_of(const RankPlan& plan, ArrayKind kind) {
  std::set<int> storages;
  for (size_t i = array_kinds; i < plan.arrays.size(); ++i)
    if (plan.arrays[i].kind == kind) storages.insert(plan.arrays[i].storage);
  return storages.size();
}

TEST(RingMemory, IsTwoBlocksHoweverManyRanks) {
  for (const int cp : {2, 3, 8, 64})
    for (const char* name : {"ring", "ring-forward", "group-cast", "all-gather-strided"}) {
      AttentionCase c;
      c.layout = layout_case("dual-chunk-swap", full_bounds({2 * cp}), cp);
      c.heads = shape_of(8, 8);
      for (const int rank : {0, cp / 2, cp - 1}) {
        const RankPlan plan = plan_rank(find_schedule(name), c.problem(), rank);
        EXPECT_LE(storages_of(plan, ArrayKind::kv), 2U) << name << ", cp " << cp;
        EXPECT_LE(storages_of(plan, ArrayKind::d_kv), 2U) << name << ", cp " << cp;
      }
    }
}

}  // namespace GYRE_FILE
}  // namespace gyre
