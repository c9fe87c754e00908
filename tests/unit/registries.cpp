// The registries of schedules and layouts: what every entry must have, that it reads the options
// which it names and no others, and what apps make of that.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <set>
#include <type_traits>

#include "apps/common/registry_options.hpp"
#include "attention_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

// A reference has no default: neither entry can be made without what its references stand for.
static_assert(!std::is_default_constructible_v<Schedule>);
static_assert(!std::is_default_constructible_v<LayoutKind>);
static_assert(std::is_reference_v<decltype((std::declval<Schedule>().closed_form))>);

template <class Entry, class Options>
void check_entries(const RegistryOptions<Entry, Options>& registry) {
  std::set<std::string> names, flags;
  for (const Entry& entry : registry.entries) {
    EXPECT_TRUE(names.insert(entry.name).second) << entry.name << " is there twice";
    EXPECT_EQ(entry.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz-"), std::string::npos);
    EXPECT_FALSE(entry.summary.empty()) << entry.name;
    for (const auto member : entry.reads) {
      int known = 0;
      for (const auto& field : registry.fields) known += field.value == member ? 1 : 0;
      EXPECT_EQ(known, 1) << entry.name << " reads an option that apps do not offer";
    }
  }
  for (const auto& field : registry.fields) {
    EXPECT_TRUE(flags.insert(field.name).second) << field.name;
    EXPECT_NE(registry.readers_of(field), "none") << field.name;
    EXPECT_LE(field.minimum, Options().*field.value) << field.name;
  }
}

TEST(Registries, EntriesAreComplete) {
  check_entries(schedule_choices());
  check_entries(layout_choices());
  EXPECT_EQ(&default_schedule(), &schedules().front());
  EXPECT_EQ(&find_layout(default_layout().name), &default_layout());
}

/// What a plan is, as far as its options can change it.
std::vector<int64_t> traits_of(const RankPlan& plan, const HeadShape& heads) {
  std::vector<int64_t> traits;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const PlanCount c = count(plan, pass, heads, {});
    traits.insert(traits.end(), {c.messages, c.bytes_sent, c.transient_bytes,
                                 static_cast<int64_t>(plan.steps(pass).size())});
  }
  return traits;
}

TEST(Registries, SchedulesReadTheOptionsThatTheyName) {
  const auto c = test::layout_case("contiguous", test::full_bounds({16}), 4);
  const HeadShape heads = test::shape_of(8, 4);
  for (const Schedule& schedule : schedules())
    for (const auto& field : schedule_option_fields()) {
      std::set<std::vector<int64_t>> plans;
      for (const int64_t value : {1, 2, 4}) {
        AttentionProblem problem{&c.layout, heads, {MaskKind::causal, 2}, {}};
        problem.options.*field.value = value;
        plans.insert(traits_of(plan_rank(schedule, problem, 1), heads));
      }
      const bool reads = RegistryOptions<Schedule, ScheduleOptions>::reads(schedule, field);
      EXPECT_EQ(plans.size() > 1, reads) << schedule.name << ", " << field.name;
    }
}

TEST(Registries, LayoutsReadTheOptionsThatTheyName) {
  const test::Bounds bounds = test::full_bounds({16, 48});
  for (const LayoutKind& kind : layout_kinds())
    for (const auto& field : layout_option_fields()) {
      std::set<std::vector<int32_t>> layouts;
      for (const int64_t value : {1, 2, 1000}) {
        LayoutOptions options;
        options.cp = 2;
        options.*field.value = value;
        layouts.insert(shard_index(kind.make(bounds.view(), options), 0));
      }
      const bool reads = RegistryOptions<LayoutKind, LayoutOptions>::reads(kind, field);
      EXPECT_EQ(layouts.size() > 1, reads) << kind.name << ", " << field.name;
    }
}

TEST(Registries, SegmentRulesOfLayouts) {
  EXPECT_EQ(
      segment_rule_help(),
      "a multiple of cp under contiguous-documents, a multiple of 2 cp under dual-chunk-swap");
  EXPECT_EQ(chunks_for_all_layouts(), 2);
}

template <class Entry, class Options>
std::string problems_of(const RegistryOptions<Entry, Options>& registry,
                        const RegistryChoice<Options>& choice) {
  ConfigErrors problems;
  registry.check(choice, problems);
  return fmt::format("{}", fmt::join(problems.messages(), "\n"));
}

TEST(RegistryOptions, RefusesWhatTheChosenEntryDoesNotRead) {
  ScheduleChoice schedule;
  EXPECT_EQ(problems_of(schedule_choices(), schedule), "");
  schedule.options = {2, 4};
  EXPECT_EQ(problems_of(schedule_choices(), schedule),
            "--inner 2: schedule ring does not read it; all-to-all-ring does\n"
            "--heads-at-once 4: schedule ring does not read it; all-gather-strided does");
  schedule.name = "all-to-all-ring";
  EXPECT_EQ(problems_of(schedule_choices(), schedule),
            "--heads-at-once 4: schedule all-to-all-ring does not read it; all-gather-strided "
            "does");
  schedule.name = "all";
  EXPECT_EQ(problems_of(schedule_choices(), schedule), "");
  // The usual value may be given to any.
  schedule = {};
  schedule.options.heads_at_once = ScheduleOptions().heads_at_once;
  EXPECT_EQ(problems_of(schedule_choices(), schedule), "");
}

TEST(RegistryOptions, ANameThatTheAppHasAlreadyGetsAPrefix) {
  LayoutChoice layout;
  layout.taken = {"chunk"};
  layout.name = "contiguous";
  layout.options.chunk = 3;
  EXPECT_EQ(problems_of(layout_choices(), layout),
            "--layout-chunk 3: layout contiguous does not read it; balanced and balanced-joint do");
}

}  // namespace GYRE_FILE
}  // namespace gyre
