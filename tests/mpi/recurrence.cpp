// Recurrences over ranks: every kind under every schedule and layout, for documents that begin, end,
// cross and miss ranks, against the definition; messages and bytes against the closed forms.

#include <gtest/gtest.h>

#include "comm/agree.hpp"
#include "comm/in_process.hpp"
#include "recurrence/chunk_kernel.hpp"
#include "recurrence_layer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::Layer;
using test::Mix;
using test::Sharding;

std::vector<Mix> mixes_of(int cp) {
  const int64_t ranks = cp, tokens = cp > 4 ? 20 : 70;  // of a rank; beyond 4 ranks: seconds
  return {
      {"one document on all ranks", {tokens * ranks}},
      {"a document on each rank", std::vector<int64_t>(cp, 30)},
      {"documents that end inside ranks", {tokens * ranks / 2, 3, 27, 20 * ranks, 1}},
      {"documents that end with a rank", {tokens * (ranks / 2), 0, tokens * (ranks - ranks / 2)}},
      {"many documents on a rank", std::vector<int64_t>(5 * cp, 13)},
      {"ranks without tokens", {1, 1}},
      {"a rank with some", {2 * ranks + 1}}};
}

/// Whether the schedule can do the problem; those of heads need heads that ranks divide.
bool can_do(const StateSchedule& schedule, const RecurrenceShape& shape, const Mix& mix,
            const Sharding& sharding) {
  const int cp = test::world().size();
  const PaddedLayout placed(test::offsets_of(mix.lengths), find_layout(sharding.layout),
                            test::of_ranks(cp, sharding.run));
  return schedule.why_not({&placed.layout, shape}).empty();
}

/// Runs both passes and compares them. Buffers begin as NaN.
void check(const RecurrenceShape& shape, DType type, const StateSchedule& schedule, const Mix& mix,
           const Sharding& sharding, const std::string& what) {
  Layer run(shape, type, schedule, mix, sharding);
  run.executor.overwrite(std::byte{0xff});
  run.check_traffic(Pass::forward);
  run.check_traffic(Pass::backward);
  std::string text;
  EXPECT_LT(run.worst_error(text), 1)
      << what << ", " << schedule.name << ", " << sharding.layout << ' ' << sharding.run << ", "
      << mix.name << ", " << name_of(type) << ", rank " << run.rank << ": " << text;
}

TEST(MpiRecurrence, EveryKindUnderEveryScheduleAgreesWithTheDefinition) {
  const int cp = test::world().size();
  for (const RecurrenceKind& kind : recurrence_kinds())
    for (const StateSchedule& schedule : state_schedules())
      for (const Mix& mix : mixes_of(cp))
        for (const DType type : {DType::f32, DType::bf16}) {
          if (type == DType::bf16 && mix.lengths.size() != 5) continue;  // those that end inside
          RecurrenceShape shape(kind, 2, 4, 16, 12);
          if (!can_do(schedule, shape, mix, {})) shape = {kind, cp, cp, 4, 3};
          check(shape, type, schedule, mix, {}, kind.name);
        }
}

// Histories are of 3 tokens, and of 9, which are on several ranks where parts are shorter.
TEST(MpiRecurrence, AConvolutionBeforeItAgreesWithTheDefinition) {
  const int cp = test::world().size();
  int done = 0;
  const std::vector<std::pair<const char*, std::vector<int64_t>>> cases = {{"gdn", {1, 4, 10}},
                                                                           {"gla", {4}}};
  for (const auto& [kind, widths] : cases)
    for (const int64_t width : widths)
      for (const StateSchedule& schedule : state_schedules())
        for (const Sharding& sharding : {Sharding{}, Sharding{"dual-chunk-swap"}}) {
          if (sharding.layout != Sharding{}.layout && width != 4) continue;
          if (cp > 4 && width != 10) continue;  // seconds
          std::vector<Mix> mixes = mixes_of(cp);
          mixes.push_back({"short parts", {3 * cp + 1, 2}});
          for (const Mix& mix : mixes)
            for (const DType type : {DType::f32, DType::bf16}) {
              if (type == DType::bf16 && mix.lengths.size() != 5) continue;
              const RecurrenceKind& of = test::named(recurrence_kinds(), kind);
              RecurrenceShape shape(of, 1, 2, 8, 6);
              if (!can_do(schedule, shape, mix, sharding)) shape = {of, cp, 2 * cp, 4, 3};
              shape.convolution = width;
              if (!can_do(schedule, shape, mix, sharding)) continue;
              check(shape, type, schedule, mix, sharding,
                    fmt::format("{}, {} tokens", kind, width));
              ++done;
            }
        }
  EXPECT_GE(done, 20);
}

TEST(MpiRecurrence, EveryLayoutUnderEveryScheduleAgreesWithTheDefinition) {
  const int cp = test::world().size();
  const Sharding layouts[] = {{"zigzag"},      {"dual-chunk-swap"}, {"striped"},
                              {"striped", 20}, {"balanced", 16},    {"balanced-joint", 16},
                              {"hybrid"}};
  int done = 0, next = 0;
  for (const StateSchedule& schedule : state_schedules())
    for (const Mix& mix : mixes_of(cp))
      for (const Sharding& sharding : layouts) {
        const RecurrenceKind& kind = recurrence_kinds()[next++ % recurrence_kinds().size()];
        RecurrenceShape shape(kind, 1, 2, 8, 6);
        if (!can_do(schedule, shape, mix, sharding)) shape = {kind, cp, cp, 4, 3};
        if (!can_do(schedule, shape, mix, sharding)) continue;
        check(shape, DType::f32, schedule, mix, sharding, kind.name);
        ++done;
      }
  EXPECT_GE(done, 20 * std::ssize(mixes_of(cp)));
}

// A rank without as many parts that continue as another sends identities, M = 1 and B = 0: nobody
// gets what its buffers held before.
TEST(MpiRecurrence, WhatDoesNotContinueIsSentAsTheIdentity) {
  for (const RecurrenceKind& kind : recurrence_kinds())
    for (const Mix& mix : mixes_of(test::world().size()))
      for (const Sharding& sharding : {Sharding{}, Sharding{"dual-chunk-swap"}}) {
        const StateSchedule& gather = test::named(state_schedules(), "state-gather");
        const RecurrenceShape shape(kind, 1, 2, 8, 4);
        if (!can_do(gather, shape, mix, sharding)) continue;
        Layer run(shape, DType::f32, gather, mix, sharding);
        run.executor.overwrite(std::byte{0xff});
        run.executor.run(Pass::forward);
        std::vector<float> map(elements_of(StateKind::map, run.shape)),
            state(elements_of(StateKind::state, run.shape));
        run.kernel->identity(map, state);
        for (const StateStep& step : run.plan.forward) {
          const auto* exchange = std::get_if<state_step::Exchange>(&step);
          if (exchange == nullptr) continue;
          for (const StateMessage& m : exchange->recvs) {
            const auto maps =
                std::ranges::count_if(run.problem.parts.of_rank[m.peer], &StatePart::continues);
            for (size_t i = 2 * maps; i < m.buffers.size(); i += 2) {
              EXPECT_TRUE(std::ranges::equal(run.executor.buffer(m.buffers[i]), map)) << mix.name;
              EXPECT_TRUE(std::ranges::equal(run.executor.buffer(m.buffers[i + 1]), state));
            }
          }
        }
      }
}

// The results of a run do not depend on what earlier runs have left.
TEST(MpiRecurrence, TheSameRunTwiceGivesTheSameBits) {
  const Mix mix{"", {100, int64_t{15} * test::world().size()}};
  for (const StateSchedule& schedule : state_schedules()) {
    const int heads = test::world().size();
    RecurrenceShape shape(test::named(recurrence_kinds(), "kda"), heads, heads, 16, 8);
    shape.convolution = 4;
    Layer run(shape, DType::f32, schedule, mix);
    std::vector<std::vector<float>> results;
    for (const std::byte left : {std::byte{0}, std::byte{0x55}}) {
      run.executor.overwrite(left);
      run.executor.run(Pass::forward);
      run.executor.run(Pass::backward);
      results.push_back(run.results());
    }
    EXPECT_EQ(results[0], results[1]) << schedule.name;
  }
}

// A replay, whose ranks take turns in one process, has the bits of a run on as many ranks. Over more
// than two, an all-reduce adds the gradients of the weights in the library's order.
TEST(MpiRecurrence, AReplayHasTheBitsOfTheRanks) {
  const int cp = test::world().size();
  const Sharding layouts[] = {
      {"contiguous"},  {"zigzag"},       {"dual-chunk-swap"},    {"striped"},
      {"striped", 20}, {"balanced", 16}, {"balanced-joint", 16}, {"contiguous-documents"}};
  const Mix mix{"documents that end inside ranks", {30 * cp, 3, 27, 10 * cp, 1}};
  int done = 0, next = 0;
  for (const StateSchedule& schedule : state_schedules())
    for (const Sharding& sharding : layouts) {
      const RecurrenceKind& kind = recurrence_kinds()[next++ % recurrence_kinds().size()];
      RecurrenceShape shape(kind, cp, 2 * cp, 8, 6);
      shape.convolution = 4;
      if (!can_do(schedule, shape, mix, sharding)) continue;
      const auto run_both = [](Layer& layer) {
        layer.executor.overwrite(std::byte{0xff});
        layer.executor.run(Pass::forward);
        layer.executor.run(Pass::backward);
        return layer.results();
      };
      Layer run(shape, DType::f32, schedule, mix, sharding);
      const std::vector<float> mine = run_both(run);
      RanksInProcess ranks(cp);
      std::vector<float> replayed;
      ranks.run([&](int rank) {
        Layer layer(shape, DType::f32, schedule, mix, sharding, ranks.of(rank));
        const std::vector<float> results = run_both(layer);
        if (rank == run.rank) replayed = results;
      });
      ASSERT_EQ(mine.size(), replayed.size());
      const size_t sums = cp > 2 ? shape.channels() * shape.convolution : 0;
      for (size_t i = 0; i < mine.size() - sums; ++i)
        ASSERT_EQ(mine[i], replayed[i]) << schedule.name << ", " << sharding.layout << ", " << i;
      for (size_t i = mine.size() - sums; i < mine.size(); ++i)
        ASSERT_NEAR(mine[i], replayed[i], 1e-4) << schedule.name << ", " << sharding.layout;
      ++done;
    }
  EXPECT_GE(done, 24);
}

}  // namespace GYRE_FILE
}  // namespace gyre
