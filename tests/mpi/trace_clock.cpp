// Clocks of ranks compared with rank 0's, and the trace of all ranks in one file.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "comm/agree.hpp"
#include "comm/trace_file.hpp"
#include "io_files.hpp"
#include "mpi_test.hpp"
#include "runtime/host.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::world;
using Json = nlohmann::json;

// Seconds lost when times of a machine that has been up for years are added as doubles.
constexpr double rounding = 1e-7;

TEST(TraceClock, RanksOfOneMachineShareAClock) {
  const ClockOffset offset = align_clocks(world());
  EXPECT_LE(std::abs(offset.seconds), offset.uncertainty_s + rounding);
  EXPECT_EQ(offset.uncertainty_s > 0, world().rank() != 0);
  EXPECT_LT(offset.uncertainty_s, 10);
  if (world().rank() == 0) {
    EXPECT_EQ(offset.seconds, 0);
  }
}

TEST(TraceClock, ClocksThatDifferAreAligned) {
  const double wrong = 1000.5 * world().rank() - 3;
  const auto clock = [&] { return Trace::now() + wrong; };
  for (const int rounds : {1, 20}) {
    const ClockOffset offset = align_clocks(world(), rounds, clock);
    EXPECT_NEAR(offset.seconds, -1000.5 * world().rank(), offset.uncertainty_s + rounding);
  }
}

TEST(TraceClock, TheQuickestAnswerCounts) {
  // Rank 0 answers at once; the others' clock makes the rounds seem slow by jumping between
  // question and answer. Only the third of five is honest.
  int calls = 0;
  const auto clock = [&] {
    const int round = calls++ / 2;
    const bool answer = calls % 2 == 0;
    return Trace::now() + (world().rank() > 0 && round != 2 && answer ? 100.0 : 0.0);
  };
  const ClockOffset offset = align_clocks(world(), 5, clock);
  EXPECT_LT(offset.uncertainty_s, 10);
  EXPECT_LE(std::abs(offset.seconds), offset.uncertainty_s + rounding);
}

TEST(TraceClock, RanksThatReadOneClockDoNotCompareIt) {
  const ClockOffset offset = common_clock(world());
  EXPECT_NE(monotonic_clock_id(), 0);
  EXPECT_EQ(offset.seconds, 0);
  EXPECT_EQ(offset.uncertainty_s, 0);
}

TEST(TraceClock, RanksOfAnotherClockShareTheBestComparison) {
  // The first half reads rank 0's clock, the second half another one.
  const bool other = 2 * world().rank() >= world().size() && world().size() > 1;
  const ClockOffset offset = common_clock(world(), other ? 2 : 1);
  const std::vector<double> seconds = all_gather_value(world(), offset.seconds),
                            errors = all_gather_value(world(), offset.uncertainty_s);
  EXPECT_EQ(offset.uncertainty_s > 0, other);
  EXPECT_LE(std::abs(offset.seconds), offset.uncertainty_s + rounding);
  if (!other) return;
  EXPECT_EQ(offset.seconds, seconds.back());
  EXPECT_EQ(offset.uncertainty_s, errors.back());
}

TEST(TraceClock, UnknownClocksAreCompared) {
  const ClockOffset offset = common_clock(world(), 0);
  EXPECT_EQ(offset.uncertainty_s > 0, world().rank() != 0);
}

TEST(TraceFile, TellsRank0OfTheMessagesOfAllRanks) {
  const int ranks = world().size(), rank = world().rank();
  const int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
  Trace trace;
  if (ranks > 1)
    trace.add({TraceLane::communication,
               "KV",
               5,
               6,
               SpanKind::message,
               3,
               "fwd",
               {{next, 100 + rank}},
               {{before, 100 + before}}});
  const std::string text = trace_text(trace, world(), {});
  const Json document = Json::parse(broadcast_string(world(), text, 0));
  int starts = 0, ends = 0;
  for (const Json& event : document["traceEvents"]) {
    const int pid = event["pid"];
    if (event["ph"] == "s") {
      ++starts;
      EXPECT_EQ(event["args"],
                (Json{{"peer", (pid + 1) % ranks}, {"bytes", 100 + pid}, {"step", 3}}));
    } else if (event["ph"] == "f") {
      ++ends;
      EXPECT_EQ(event["args"]["peer"], (pid + ranks - 1) % ranks);
    }
  }
  EXPECT_EQ(starts, ranks > 1 ? ranks : 0);
  EXPECT_EQ(ends, starts);
}

TEST(TraceFile, HoldsTheSpansOfAllRanks) {
  const int ranks = world().size(), rank = world().rank();
  Trace trace;  // rank r: r + 1 spans, on a clock that is 100 r seconds ahead
  for (int i = 0; i <= rank; ++i) {
    const double begin = 5000 + 100.0 * rank + i;
    trace.add({i % 2 == 0 ? TraceLane::compute : TraceLane::communication,
               fmt::format("span {} of rank {}", i, rank), begin, begin + 0.5});
  }
  const std::string text = trace_text(trace, world(), {-100.0 * rank, 1e-6 * rank});
  const Json document = Json::parse(broadcast_string(world(), text, 0));
  std::map<std::string, double> begins;
  for (const Json& event : document["traceEvents"]) {
    if (event["ph"] == "X") {
      begins[event["name"]] = event["ts"];
      EXPECT_EQ(event["dur"], 500'000);
    }
    if (event["name"] == "process_name") {
      EXPECT_EQ(event["args"]["name"],
                fmt::format("rank {} on {}", event["pid"].get<int>(), host_name()));
    }
  }
  EXPECT_EQ(std::ssize(begins), ranks * (ranks + 1) / 2);
  for (int r = 0; r < ranks; ++r)
    for (int i = 0; i <= r; ++i)
      EXPECT_EQ(begins.at(fmt::format("span {} of rank {}", i, r)), 1e6 * i) << r;
  ASSERT_EQ(std::ssize(document["otherData"]["clocks"]), ranks);
  EXPECT_EQ(document["otherData"]["clocks"].back()["offset_us"], -100e6 * (ranks - 1));
}

}  // namespace GYRE_FILE
}  // namespace gyre
