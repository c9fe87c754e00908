// The emulated kernel on a clock of its own: how long its calls take, when it sleeps and when it
// lets communication advance. And what --emulate-compute says.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "attention/kernels/emulated.hpp"
#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

/// A kernel whose time and sleep are made up. Times are in seconds.
class EmulatedKernel : public testing::Test {
 protected:
  std::unique_ptr<BlockKernel> kernel(double slice) {
    return make_emulated_kernel([this](const KernelCall&) { return takes; },
                                {slice, [this] { return event; }, [this] { return now; },
                                 [this](double time) {
                                   slept.push_back(time - now);
                                   now = std::max(now, time) + late;
                                 }});
  }
  /// Calls the kernel; returns when it ends.
  double call(BlockKernel& k) {
    ForwardBlock block;
    block.progress = [this] {
      ++polls;
      now += poll_takes;
      if (event <= now) event = std::numeric_limits<double>::infinity();
    };
    k.forward(block);
    return now;
  }

  double now = 100, takes = 8, late = 0, poll_takes = 0;
  double event = std::numeric_limits<double>::infinity();
  std::vector<double> slept;
  int polls = 0;
};

TEST_F(EmulatedKernel, SleepsInSlicesAndPollsAfterEach) {
  const auto k = kernel(3);
  EXPECT_EQ(call(*k), 108);
  EXPECT_EQ(slept, (std::vector<double>{3, 3, 2}));
  EXPECT_EQ(polls, 3);
  takes = 0;
  EXPECT_EQ(call(*k), 108);
  EXPECT_EQ(polls, 3) << "a call of no time does not sleep";
  EXPECT_TRUE(k->can_overwrite());
}

TEST_F(EmulatedKernel, WakesUpForWhatTheNetworkWants) {
  const auto k = kernel(5);
  event = 101;
  EXPECT_EQ(call(*k), 108);
  EXPECT_EQ(slept, (std::vector<double>{1, 5, 2}));
}

TEST_F(EmulatedKernel, LatenessIsRepaidByTheNextCalls) {
  const auto k = kernel(4);
  late = 1;  // every sleep
  EXPECT_EQ(call(*k), 109);
  EXPECT_EQ(call(*k), 117) << "due at 116, as without the lateness";
  EXPECT_EQ(call(*k), 125);
  poll_takes = 20;  // a long message: two calls' time
  EXPECT_EQ(call(*k), 150) << "due at 132";
  poll_takes = late = 0;
  EXPECT_EQ(call(*k), 150) << "cannot end before it begins";
}

TEST_F(EmulatedKernel, AWaitBetweenTwoCallsAbsorbsLateness) {
  const auto k = kernel(8);
  late = 2;
  EXPECT_EQ(call(*k), 110);
  late = 0;
  now += 0.5;
  EXPECT_EQ(call(*k), 117) << "1.5 of the 2 are repaid";
  late = 2;
  EXPECT_EQ(call(*k), 127);
  late = 0;
  now += 30;
  EXPECT_EQ(call(*k), 165) << "nothing is left to repay";
}

/// Of a rectangle of 3 queries and 5 keys.
double seconds_of(const KernelTime& time, Pass pass, bool d_q, bool d_kv) {
  const std::vector<Rectangle> rectangles{{0, 3, 0, 5, {}}};
  BlockInput input;
  input.heads = {4, 2, 16, 2, 0, 1};
  input.rectangles = rectangles;
  return time({pass, input, d_q, d_kv});
}

TEST(KernelTime, IsThatOfTheFlopsAndALaunch) {
  const double product = 2. * 16 * 3 * 5 * 4;
  const KernelTime time = parse_kernel_time("tflops=0.5,launch=10us");
  EXPECT_DOUBLE_EQ(seconds_of(time, Pass::forward, false, false), 10e-6 + 2 * product / 0.5e12);
  EXPECT_DOUBLE_EQ(seconds_of(time, Pass::backward, true, true), 10e-6 + 5 * product / 0.5e12);
  EXPECT_DOUBLE_EQ(seconds_of(time, Pass::backward, true, false), 10e-6 + 3 * product / 0.5e12);
  EXPECT_DOUBLE_EQ(seconds_of(time, Pass::backward, false, true), 10e-6 + 4 * product / 0.5e12);
  EXPECT_DOUBLE_EQ(seconds_of(parse_kernel_time("tflops=2"), Pass::forward, false, false),
                   2 * product / 2e12);
  const BlockInput nothing;
  EXPECT_EQ(time({Pass::forward, nothing}), 0);
}

TEST(KernelTime, KnowsWhatIsMergedWithEarlierResults) {
  const std::vector<Rectangle> rectangles{{0, 3, 0, 5, {}}};
  std::vector<int64_t> merged;
  const auto k = make_emulated_kernel(
      [&](const KernelCall& call) {
        merged.push_back(call.merged);
        return 0.0;
      },
      {});
  ForwardBlock forward;
  BackwardBlock backward;
  for (BlockInput* input :
       {static_cast<BlockInput*>(&forward), static_cast<BlockInput*>(&backward)}) {
    input->heads = {4, 2, 16, 2, 0, 1};
    input->rectangles = rectangles;
  }
  k->forward(forward);
  forward.overwrite = true;
  k->forward(forward);
  std::array<float, 1> values = {};
  backward.d_q.data = reinterpret_cast<std::byte*>(values.data());
  backward.d_k.data = values.data();
  k->backward(backward);
  backward.overwrite_d_q = true;
  k->backward(backward);
  backward.overwrite_d_kv = true;
  k->backward(backward);
  EXPECT_EQ(merged,
            (std::vector<int64_t>{3 * 4 * 16, 0, 3 * 4 * 16 + 5 * 2 * 2 * 16, 5 * 2 * 2 * 16, 0}));
}

TEST(KernelTime, RefusesWhatItDoesNotKnow) {
  const auto refused = [](const std::string& text, const std::string& message) {
    SCOPED_TRACE(text);
    test::expect_usage("compute: " + message, [&] { parse_kernel_time(text); });
  };
  refused("fast", "'fast' is none of tflops=RATE and launch=TIME");
  refused("tflops=1,alpha=1us", "'alpha=1us' is none of tflops=RATE and launch=TIME");
  refused("tflops=1,tflops=2", "tflops is given twice in 'tflops=1,tflops=2'");
  refused("launch=1us", "'launch=1us' has no tflops, as in tflops=0.1,launch=10us");
  for (const char* value : {"0", "-1", "1T", "inf", "nan", ""})
    refused(fmt::format("tflops={}", value),
            fmt::format("tflops is '{}'; it must be a number above 0, as in tflops=0.1", value));
  refused("tflops=1,launch=10",
          "launch is '10'; it must be a number of us, ms or s, as in launch=10us");
}

}  // namespace GYRE_FILE
}  // namespace gyre
