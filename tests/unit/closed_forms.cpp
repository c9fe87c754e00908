// What plans count against formulas: pairs, bytes, messages, memory of every schedule.

#include "attention/closed_forms.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "attention_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::AttentionCase;
using test::full_bounds;
using test::layout_case;
using test::shape_of;
using Longs = std::vector<int64_t>;

TEST(ClosedForm, IsWhatEveryScheduleCounts) {
  for (const Schedule& schedule : schedules())
    EXPECT_TRUE(rc::check(schedule.name, [&] {
      const AttentionCase c = test::arbitrary_attention(*rc::gen::inRange(1, 9));
      const AttentionProblem problem = c.problem();
      RC_PRE(schedule.why_not(problem).empty());
      const auto type = [] { return *rc::gen::element(DType::f32, DType::bf16); };
      const ElementTypes types{type(), type(), type(), type()};
      for (int rank = 0; rank < problem.cp(); ++rank)
        for (const Pass pass : {Pass::forward, Pass::backward}) {
          const PlanCount counted =
              count(plan_rank(schedule, problem, rank), pass, problem.heads, types);
          const ClosedForm form = schedule.closed_form({problem, types, rank, pass});
          RC_LOG() << c.layout.kind << ", heads " << c.heads.heads << ":" << c.heads.kv_heads
                   << ", inner " << c.options.inner << ", at once " << c.options.heads_at_once
                   << ", rank " << rank << " of " << problem.cp() << ", " << name_of(pass) << "\n";
          RC_ASSERT(counted.messages == form.messages);
          RC_ASSERT(counted.bytes_sent == form.bytes_sent);
          RC_ASSERT(counted.bytes_received == form.bytes_received);
          RC_ASSERT(counted.transient_bytes == form.transient_bytes);
          if (form.pairs) RC_ASSERT(counted.pairs == *form.pairs);
        }
    }));
}

TEST(VisiblePairsOf, OfALayoutThatIsNotRegisteredIsNone) {
  auto c = layout_case("contiguous", full_bounds({8}), 2);
  c.layout.name = "contigous";
  const AttentionProblem problem = {&c.layout, shape_of(1, 1), {}, {}};
  EXPECT_FALSE(visible_pairs_of(problem, 0).has_value());
  EXPECT_FALSE(needed_share(problem).has_value());
}

/// Bytes that a rank sends forward and backward, in units of its tokens of one head.
Longs units(const char* schedule, HeadShape heads, int cp, DType gradients) {
  constexpr int64_t tokens = 4;
  const auto c = layout_case("dual-chunk-swap", full_bounds({tokens * cp}), cp);
  const AttentionProblem problem = {&c.layout, heads, {}, {}};
  const ElementTypes types{DType::bf16, DType::bf16, DType::bf16, gradients};
  Longs result;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const RankPlan plan = plan_rank(find_schedule(schedule), problem, 0);
    const int64_t bytes = count(plan, pass, heads, types).bytes_sent;
    result.push_back(bytes / (tokens * heads.head_dim * 2));
  }
  return result;
}

TEST(ClosedForm, OfTheUsualShapes) {
  // In units of N·D·e the all-gather moves 2 (cp-1)/cp H_kv (2 + e_g/e), the all-to-all
  // 4 (cp-1)/cp (H + H_kv)/cp, or more where KV heads are replicated. Here times cp: per rank.
  const HeadShape wide = shape_of(64, 8, 4);
  EXPECT_EQ(units("all-gather", wide, 8, DType::bf16), (Longs{7 * 16, 7 * 32}));     // 42 · 8
  EXPECT_EQ(units("all-gather", wide, 8, DType::f32), (Longs{7 * 16, 7 * 48}));      // 56 · 8
  EXPECT_EQ(units("all-to-all", wide, 8, DType::bf16), (Longs{7 * 18, 7 * 18}));     // 31.5 · 8
  EXPECT_EQ(units("all-to-all", wide, 4, DType::bf16), (Longs{108, 108}));           // 54 · 4
  EXPECT_EQ(units("all-to-all", wide, 16, DType::bf16), (Longs{15 * 10, 15 * 10}));  // 18.75 · 16
  EXPECT_EQ(units("all-gather", shape_of(16, 1, 4), 16, DType::f32), (Longs{30, 90}));  // 7.5 · 16
  EXPECT_EQ(units("all-to-all", shape_of(16, 1, 4), 16, DType::bf16), (Longs{60, 60}));  // 7.5 · 16
  // A ring that turns round has one hop of the block less; one that does not, one of dKV more.
  EXPECT_EQ(units("ring", wide, 8, DType::bf16), (Longs{7 * 16, (6 + 7) * 16}));
  EXPECT_EQ(units("ring", wide, 8, DType::f32), (Longs{7 * 16, 6 * 16 + 7 * 32}));
  EXPECT_EQ(units("ring-forward", wide, 8, DType::bf16), (Longs{7 * 16, (7 + 8) * 16}));
  EXPECT_EQ(units("ring", wide, 2, DType::bf16), (Longs{16, 16}));
}

Longs pairs_of(const char* kind, const test::Bounds& bounds, int cp, const MaskRule& mask,
               int64_t stripe = 1) {
  const auto c = layout_case(kind, bounds, cp, stripe);
  Longs pairs;
  for (int r = 0; r < cp; ++r)
    pairs.push_back(visible_pairs_of({&c.layout, shape_of(1, 1), mask, {}}, r).value_or(-1));
  return pairs;
}

TEST(VisiblePairsOf, OneCausalSequence) {
  const MaskRule causal;
  // S = 16, cp = 4, L = 4: r L² + L(L+1)/2; S(S+1)/(2 cp); (r+1) L(L+1)/2 + (cp-1-r) L(L-1)/2.
  EXPECT_EQ(pairs_of("contiguous", full_bounds({16}), 4, causal), (Longs{10, 26, 42, 58}));
  EXPECT_EQ(pairs_of("contiguous-documents", full_bounds({8, 8}), 2, causal), (Longs{20, 52}));
  EXPECT_EQ(pairs_of("dual-chunk-swap", full_bounds({16}), 4, causal), (Longs{34, 34, 34, 34}));
  EXPECT_EQ(pairs_of("zigzag", full_bounds({16}), 4, causal), (Longs{34, 34, 34, 34}));
  EXPECT_EQ(pairs_of("striped", full_bounds({16}), 4, causal), (Longs{28, 32, 36, 40}));
  EXPECT_EQ(pairs_of("striped", full_bounds({16}), 4, {MaskKind::causal, 3}),
            (Longs{10, 11, 12, 12}));
  EXPECT_EQ(pairs_of("striped", full_bounds({16}), 4, MaskKind::full), (Longs(4, 64)));
  EXPECT_EQ(pairs_of("hybrid", full_bounds({16}), 4, causal), (Longs{34, 34, 34, 34}));
  EXPECT_EQ(pairs_of("hybrid", full_bounds({5, 0, 5, 5, 5}), 2, causal), (Longs{30, 30}));
  EXPECT_EQ(pairs_of("hybrid", full_bounds({8, 8, 8}), 2, causal), (Longs(2, -1)));
  // No form: a stripe of two, a length that cp does not divide, unequal sequences, padding.
  EXPECT_EQ(pairs_of("striped", full_bounds({16}), 4, causal, 2), (Longs(4, -1)));
  EXPECT_EQ(pairs_of("striped", full_bounds({15}), 4, causal), (Longs(4, -1)));
  EXPECT_EQ(pairs_of("contiguous", full_bounds({8, 4}), 4, causal), (Longs(4, -1)));
  EXPECT_EQ(pairs_of("contiguous", test::bounds_of({7}, {8}), 4, causal), (Longs(4, -1)));
}

TEST(VisiblePairsOf, AgreesWithCountingForEqualSequencesAndAllMasks) {
  EXPECT_TRUE(rc::check("brute force", [] {
    const auto kind = *rc::gen::element<std::string>("contiguous", "contiguous-documents",
                                                     "dual-chunk-swap", "zigzag", "striped");
    const int cp = *rc::gen::inRange(1, 9);
    const int64_t multiple = kind == "striped" ? cp : find_layout(kind).segment_multiple(cp);
    const int64_t length = multiple * *rc::gen::inRange<int64_t>(1, 40 / multiple + 2);
    AttentionCase c;
    const auto count = *rc::gen::inRange<size_t>(0, 5);
    Longs lengths(count, length);
    const auto empty = *rc::gen::inRange<size_t>(0, 3);
    for (size_t i = 0; i < empty; ++i)
      lengths.insert(lengths.begin() + *rc::gen::inRange<int64_t>(0, std::ssize(lengths) + 1), 0);
    c.layout = layout_case(kind, full_bounds(lengths), cp);
    c.mask = test::arbitrary_mask(lengths);
    if (c.mask.kind == MaskKind::regions && count > 1) {
      RC_ASSERT(!visible_pairs_of(c.problem(), 0));
      return;
    }
    c.heads = shape_of(1, 1);
    const auto keys = test::visible_keys(c.bounds(), c.mask, c.layout.layout.padded_slots);
    for (int r = 0; r < cp; ++r) {
      int64_t pairs = 0;
      for (const int32_t slot : shard_index(c.layout.layout, r)) pairs += std::ssize(keys[slot]);
      RC_ASSERT(visible_pairs_of(c.problem(), r) == std::optional(pairs));
    }
  }));
}

TEST(NeededShare, OfOneCausalSequence) {
  for (int cp = 2; cp <= 8; ++cp)
    for (const auto& [kind, share] :
         std::vector<std::pair<std::string, double>>{{"contiguous", 0.5},
                                                     {"contiguous-documents", 0.5},
                                                     {"dual-chunk-swap", 0.75},
                                                     {"hybrid", 0.75},
                                                     {"striped", 1 - 1.0 / 12}}) {
      AttentionCase c;
      c.layout = layout_case(kind, full_bounds({6 * cp}), cp);
      c.heads = shape_of(4, 2);
      const AttentionProblem problem = c.problem();
      ASSERT_TRUE(needed_share(problem).has_value()) << kind;
      EXPECT_DOUBLE_EQ(*needed_share(problem), share) << kind;
      int64_t ring = 0, cast = 0;
      for (int r = 0; r < cp; ++r) {
        const auto sent = [&](const char* schedule) {
          return count(plan_rank(find_schedule(schedule), problem, r), Pass::forward, c.heads, {})
              .bytes_sent;
        };
        ring += sent("ring");
        cast += sent("group-cast");
      }
      EXPECT_DOUBLE_EQ(static_cast<double>(cast) / static_cast<double>(ring), share)
          << kind << ", cp " << cp;
    }
}

TEST(NeededShare, HasNoFormElsewhere) {
  const auto has = [](const char* kind, const test::Bounds& bounds, int cp, const MaskRule& mask) {
    const auto c = layout_case(kind, bounds, cp);
    return needed_share({&c.layout, shape_of(1, 1), mask, {}}).has_value();
  };
  EXPECT_TRUE(has("contiguous", full_bounds({8}), 2, {}));
  EXPECT_FALSE(has("contiguous", full_bounds({8}), 1, {}));
  EXPECT_FALSE(has("contiguous", full_bounds({7}), 2, {}));
  EXPECT_FALSE(has("contiguous", full_bounds({4, 4}), 2, {}));
  EXPECT_FALSE(has("contiguous", full_bounds({8}), 2, MaskKind::full));
  EXPECT_FALSE(has("contiguous", full_bounds({8}), 2, {MaskKind::causal, 3}));
  EXPECT_FALSE(has("hybrid", full_bounds({6}), 2, {}));
  EXPECT_FALSE(has("balanced", full_bounds({8}), 2, {}));
}

}  // namespace GYRE_FILE
}  // namespace gyre
