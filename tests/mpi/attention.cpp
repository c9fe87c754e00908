// Every schedule under every layout on real ranks, both directions, against the whole attention in
// double precision.

#include "attention/masks/registry.hpp"
#include "attention_run.hpp"
#include "mask_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Attention;
using test::bits_of;
using test::Configuration;
using test::expect_empty_padding;
using test::expect_results;
using test::make_problem;
using test::mixed_mask;
using test::options_of;
using test::Problem;
using test::ProblemSpec;
using test::same_bits;
using test::world;

/// Runs a problem under the given schedules and layouts.
void expect_right(const ProblemSpec& spec, const std::vector<const Schedule*>& some_schedules,
                  const std::vector<const LayoutKind*>& some_layouts,
                  const ElementTypes& types = {}) {
  const bool poisoned = poison_new_buffers(true);
  const auto kernel = make_cpu_kernel();
  const Problem p = make_problem(spec);
  for (const Schedule* schedule : some_schedules)
    for (const LayoutKind* layout : some_layouts)
      for (const ScheduleOptions& options : options_of(*schedule)) {
        const Configuration c{*schedule, *layout, types, options};
        SCOPED_TRACE(name_of(c, spec));
        Attention attention(p, c, world(), *kernel);
        if (attention.refused()) continue;
        attention.run();
        expect_results(p, attention, attention.tolerances());
        expect_empty_padding(attention);
      }
  poison_new_buffers(poisoned);
}

template <class T>
std::vector<const T*> all_of(const std::vector<T>& registry) {
  std::vector<const T*> pointers;
  for (const T& entry : registry) pointers.push_back(&entry);
  return pointers;
}

const std::vector<int64_t> ragged = {37, 0, 1, 2, 5, 19};

const std::vector<MaskRule> masks = {{MaskKind::causal},
                                     {MaskKind::full},
                                     {MaskKind::causal, 6},
                                     {MaskKind::causal, 20},
                                     parse_mask("causal,window=6,keep=3").of(ragged),
                                     parse_mask("prefix-lm,prefix=7").of(ragged),
                                     parse_mask("block-causal,block=4").of(ragged),
                                     parse_mask("chunked,chunk=9").of(ragged),
                                     parse_mask("shared-prefix,prompt=9,answer=8").of(ragged),
                                     parse_mask("sliding-window,window=4,global=3").of(ragged),
                                     mixed_mask(ragged)};
/// 1, 2, 8 and all query heads to a KV head; fewer KV heads than ranks, and heads that ranks do not
/// divide; values wider and narrower than keys; elements of keys that heads share.
const std::vector<HeadShape> groupings = {
    {3, 3, 8, 0}, {4, 2, 8, 0, 12}, {16, 2, 8, 0}, {6, 1, 8, 0, 6}, {6, 6, 8, 0, 6, 2}};

/// Calls run(heads, mask, layouts) for each of some groupings of heads and masks: with all layouts,
/// or on many ranks with every third: of three groupings and three masks or more, each layout meets
/// each mask and each grouping.
template <class Run>
void for_each_combination(const std::vector<HeadShape>& some_groupings,
                          const std::vector<MaskRule>& some_masks, const Run& run) {
  for (size_t g = 0; g < some_groupings.size(); ++g)
    for (size_t m = 0; m < some_masks.size(); ++m) {
      const std::vector<const LayoutKind*> all = all_of(layout_kinds());
      std::vector<const LayoutKind*> some;
      for (size_t i = 0; i < all.size(); ++i)
        if (test::runs_combination(i + g + m)) some.push_back(all[i]);
      run(some_groupings[g], some_masks[m], some);
    }
}

TEST(Attention, EveryScheduleLayoutMaskAndGroupingOfHeads) {
  for_each_combination(groupings, masks,
                       [](const HeadShape& heads, const MaskRule& mask, const auto& layouts) {
                         expect_right({ragged, heads, mask}, all_of(schedules()), layouts);
                       });
}

TEST(Attention, KeysThatQueriesSelect) {
  expect_right({ragged, groupings[3], parse_mask("top-k,keys=5").of(ragged)}, all_of(schedules()),
               all_of(layout_kinds()));
}

const std::vector<int64_t> last_of_ragged = {5, 0, 1, 0, 5, 3};

TEST(Attention, QueriesOfTheLastTokens) {
  for_each_combination(
      {groupings[0], groupings[1], groupings.back()}, {masks[0], masks[1], masks[3], masks.back()},
      [](const HeadShape& heads, const MaskRule& mask, const auto& layouts) {
        expect_right({.lengths = ragged, .heads = heads, .mask = mask, .queries = last_of_ragged},
                     all_of(schedules()), layouts);
      });
  // Decoding: one query a document, and ranks without any.
  expect_right({.lengths = {70, 9}, .heads = {4, 2, 8, 0}, .mask = {}, .queries = {1, 1}},
               all_of(schedules()), all_of(layout_kinds()));
}

TEST(Attention, TheSameInBf16) {
  const ElementTypes types{DType::bf16, DType::f32, DType::f32, DType::bf16};
  for_each_combination(groupings, {masks[0], masks[1], masks[2], masks.back()},
                       [&](const HeadShape& heads, const MaskRule& mask, const auto& layouts) {
                         expect_right({ragged, heads, mask, false, DType::bf16},
                                      all_of(schedules()), layouts, types);
                       });
}

TEST(Attention, DocumentsOfEveryLength) {
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{1},
                                              {0, 0},
                                              {64},
                                              {300},
                                              {1, 1, 1, 1, 1, 1, 1, 1, 1},
                                              {48, 48, 48},  // a batch of equal sequences
                                              {130, 17, 64}})
    expect_right({lengths, {2, 1, 16, 0}, {MaskKind::causal}}, all_of(schedules()),
                 {&find_layout("dual-chunk-swap"), &find_layout("balanced")});
}

TEST(Attention, SinksAreTakenInOnce) {
  for (const MaskRule& mask : {MaskRule{MaskKind::causal}, MaskRule{MaskKind::causal, 6}})
    for (const std::vector<int64_t>& queries : {std::vector<int64_t>{}, last_of_ragged})
      expect_right({ragged, {4, 2, 8, 0}, mask, true, DType::f32, 11, queries}, all_of(schedules()),
                   {&find_layout("dual-chunk-swap"), &find_layout("striped")});
}

TEST(Attention, TypesOfStorageAndWireAreChosenIndependently) {
  for (const DType activations : {DType::f32, DType::bf16})
    for (const DType partial_out : {DType::f32, DType::bf16})
      for (const DType d_q : {DType::f32, DType::bf16})
        for (const DType wire : {DType::f32, DType::bf16})
          expect_right({{70, 9}, {4, 2, 16, 0}, {MaskKind::causal}, false, activations},
                       all_of(schedules()), {&find_layout("dual-chunk-swap")},
                       {activations, partial_out, d_q, wire});
}

TEST(Attention, EveryHeadDimensionOfModels) {
  for (const int64_t dim : {64, 80, 96, 128, 256})
    expect_right({{90, 40}, {2, 1, dim, 0}, {MaskKind::causal}}, {&find_schedule("ring")},
                 {&find_layout("dual-chunk-swap")});
}

TEST(Attention, TheSameRunTwiceGivesTheSameBits) {
  const auto kernel = make_cpu_kernel();
  const Problem p = make_problem({ragged, {4, 2, 8, 0}, {MaskKind::causal}, true});
  for (const Schedule& schedule : schedules())
    for (const LayoutKind& layout : layout_kinds())
      for (const ScheduleOptions& options : options_of(schedule)) {
        Attention a(p, {schedule, layout, {}, options}, world(), *kernel);
        Attention b(p, {schedule, layout, {}, options}, world(), *kernel);
        if (a.refused()) continue;
        a.run();
        b.run();
        b.run();  // and on arrays that an earlier run has left
        EXPECT_EQ(a.executor().d_sinks(), b.executor().d_sinks());
        const auto first = bits_of(a), second = bits_of(b);
        for (const auto& [token, values] : first)
          EXPECT_TRUE(same_bits(values, second.at(token)))
              << schedule.name << ", " << layout.name << ", token " << token;
      }
}

TEST(Attention, CanonicalGivesTheBitsOfOneRank) {
  const auto kernel = make_cpu_kernel();
  const auto alone = world().split(world().rank());
  const Schedule canonical = find_schedule("canonical");
  const std::vector<int64_t> lengths = {130, 0, 1, 200, 37, 3};
  const auto expect_bits = [&](const MaskRule& mask, bool sinks, const ElementTypes& types) {
    const Problem p = make_problem({lengths, {4, 2, 16, 0}, mask, sinks, types.activations});
    Attention one(p, {canonical, find_layout("contiguous"), types}, *alone, *kernel);
    one.run();
    const auto expected = bits_of(one);
    for (const LayoutKind& layout : layout_kinds()) {
      Attention all(p, {canonical, layout, types}, world(), *kernel);
      all.run();
      EXPECT_EQ(all.executor().d_sinks(), one.executor().d_sinks()) << layout.name;
      for (const auto& [token, values] : bits_of(all))
        EXPECT_TRUE(same_bits(values, expected.at(token))) << layout.name << ", token " << token;
    }
  };
  for (const bool sinks : {false, true})
    for (const MaskRule& mask : {MaskRule{MaskKind::causal}, MaskRule{MaskKind::full},
                                 MaskRule{MaskKind::causal, 40}, mixed_mask(lengths)})
      expect_bits(mask, sinks, {});
  const DType narrow = DType::bf16;
  expect_bits({MaskKind::causal}, true, {narrow, narrow, narrow, narrow});
}

}  // namespace GYRE_FILE
}  // namespace gyre
