// Repetitions, the confidence interval of the median, and the run rules.

#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

#include "mpi_test.hpp"
#include "report/repeat.hpp"

namespace gyre {
namespace GYRE_FILE {

/// Share of experiments of `n` samples whose interval holds the median 0.
double coverage(int n) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  int held = 0;
  constexpr int experiments = 20000;
  for (int e = 0; e < experiments; ++e) {
    std::vector<double> samples(n);
    for (double& x : samples) x = normal(random);
    std::sort(samples.begin(), samples.end());
    const Interval interval = median_interval(samples);
    if (interval.low <= 0 && 0 <= interval.high) ++held;
  }
  return static_cast<double>(held) / experiments;
}

// 1 - 2 · 0.5^6 = 0.969; ranks 2 and 9 of 10: 0.979; 6 and 15 of 20: 0.959 (Hollander, Wolfe).
TEST(MedianInterval, HoldsTheMedianAsOftenAsItSays) {
  EXPECT_NEAR(coverage(6), 0.969, 0.005);
  EXPECT_NEAR(coverage(10), 0.979, 0.005);
  EXPECT_NEAR(coverage(20), 0.959, 0.005);
  EXPECT_GE(coverage(1100), 0.945);
}

TEST(MedianInterval, IsUnknownForFiveSamples) {
  EXPECT_TRUE(std::isnan(median_interval(std::vector<double>{1, 2, 3, 4, 5}).low));
  EXPECT_TRUE(std::isnan(summarize(std::vector<double>{1, 2, 3, 4, 5}).half_width()));
  EXPECT_DOUBLE_EQ(summarize(std::vector<double>{9, 10, 10, 10, 10, 12}).half_width(), 0.2);
}

/// Runs `body` as often as the options say; how often that was.
template <class Body>
Timing repeated(const RepeatOptions& options, Body body) {
  Repeats repeats(options, nullptr);
  int64_t lasts = 0;
  while (repeats.next()) {
    lasts += repeats.last() ? 1 : 0;
    repeats.time(body);
  }
  EXPECT_EQ(lasts, 1);
  return repeats.timing();
}

void spin(double seconds) {
  for (const Stopwatch watch; watch.seconds() < seconds;) {
  }
}

TEST(Repeats, AsOftenAsGiven) {
  EXPECT_EQ(repeated({1}, [] {}).statistics().count, 1);
  EXPECT_EQ(repeated({9}, [] {}).statistics().count, 9);
}

/// Repetitions that take `seconds(i)`, as the machine would have it; what they come to.
template <class Seconds>
Timing taking(Seconds seconds) {
  Repeats repeats({0, 600}, nullptr);
  for (int i = 0; repeats.next(); ++i) repeats.add(seconds(i), 0.5 * seconds(i));
  return repeats.timing();
}

TEST(Repeats, StopWhenTheMedianIsKnownAndTheTimeIsEnough) {
  const Timing timing = taking([](int i) { return i % 2 == 0 ? 0.004 : 0.00404; });
  const Statistics s = timing.statistics();
  EXPECT_GE(static_cast<double>(s.count) * s.mean, 100);  // ms
  EXPECT_LE(s.count, 40);                                 // 25 would do; the next decision is near
  EXPECT_LE(s.half_width(), 0.02);
  EXPECT_DOUBLE_EQ(timing.cpu_share, 0.5);
  // Of two lengths in turns the median is never known.
  EXPECT_EQ(taking([](int i) { return i % 2 == 0 ? 0.004 : 0.005; }).statistics().count, 10000);
}

TEST(Repeats, StopAfterTheirSecondsButNotBeforeTheNinth) {
  const Stopwatch watch;
  int i = 0;
  const Timing timing = repeated({0, 0.3}, [&] { spin(++i % 2 == 0 ? 0.02 : 0.005); });
  EXPECT_GT(timing.statistics().half_width(), 0.05);
  EXPECT_GE(watch.seconds(), 0.25);
  EXPECT_EQ(repeated({0, 1e-6}, [] { spin(0.001); }).statistics().count, 9);
}

TEST(Repeats, OfNothingEndToo) {
  EXPECT_LE(repeated({0, 0.2}, [] {}).statistics().count, 10000);
}

TEST(Repeats, KnowWhoSlept) {
  const auto nap = [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
  EXPECT_LT(repeated({8}, nap).cpu_share, 0.5);
  Repeats on_gpu({2}, nullptr, false);
  while (on_gpu.next()) on_gpu.time(nap);
  EXPECT_TRUE(std::isnan(on_gpu.timing().cpu_share));
}

Timing timing_of(const std::vector<double>& milliseconds, double cpu_share) {
  return {{milliseconds}, cpu_share};
}

std::string texts_of(const Timing& timing) {
  std::string text;
  for (const Breach& breach : breaches_of(timing)) text += text_of(breach) + "\n";
  return text;
}

TEST(RunRules, QuietMeasurementsBreakNone) {
  EXPECT_EQ(texts_of(timing_of({20, 20, 20, 21, 20, 20}, 0.99)), "");
  EXPECT_EQ(texts_of({}), "") << "nothing was timed";
}

TEST(RunRules, EachIsToldWithItsValueAndItsBound) {
  EXPECT_EQ(texts_of(timing_of({30, 30, 30, 30, 30}, 1)), "too few repetitions: 5, at least 6\n");
  EXPECT_EQ(texts_of(timing_of({1, 1, 1, 1, 1, 1}, 1)),
            "too short: 0.006 s measured, at least 0.1\n");
  EXPECT_EQ(texts_of(timing_of({20, 20, 20, 20, 20, 22}, 0.5)),
            "noisy: median known to 10 %, at most 5\n"
            "noisy: a rank had 50 % of its core, at least 90\n");
  std::vector<double> spiked(40, 20);
  spiked[7] = 100;
  EXPECT_EQ(texts_of(timing_of(spiked, 1)), "noisy: CV 57.5 %, at most 20\n");
}

TEST(RunRules, RowsAreCountedAndTheWorstIsTold) {
  const Timing quiet = timing_of({20, 20, 20, 20, 20, 20}, 1);
  const Timing few = timing_of({60, 60}, 1), fewer = timing_of({110}, 1);
  const Timing starved = timing_of({20, 20, 20, 20, 20, 20}, 0.2);
  EXPECT_EQ(breaches_text({&quiet}), std::vector<std::string>{});
  EXPECT_EQ(
      breaches_text({&few, &quiet, &fewer, &starved}),
      (std::vector<std::string>{"too few repetitions: 1 in 2 of 4 rows, at least 6",
                                "noisy: a rank had 20 % of its core in 1 of 4 rows, at least 90"}));
}

TEST(RunRules, ForeignLoadIsWhatTheRanksDidNotUse) {
  const std::vector<std::string> hosts(test::world().size(), "here");
  const HostLoad begin{100, 50, 7, 4}, end{110, 75, 17, 4};
  const ForeignLoad load = foreign_load(test::world(), hosts, begin, end);
  EXPECT_DOUBLE_EQ(load.cores, 2.5 - test::world().size() * 1.0);
  EXPECT_EQ(breach_text({"here", 1.5, 4}),
            "noisy: other processes kept 1.5 of 4 cores of here busy, at most 0.5");
  EXPECT_EQ(breach_text({"here", 0.4, 4}), "");
  EXPECT_TRUE(std::isnan(foreign_load(test::world(), hosts, begin, {100.05, 51, 7, 4}).cores));
  EXPECT_GT(host_load().busy_seconds, 0);
  EXPECT_GT(host_load().own_seconds, 0);
}

}  // namespace GYRE_FILE
}  // namespace gyre
