// Times of marks in a CUDA stream, on the host's clock.

#include <pthread.h>

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "gpu_test.hpp"
#include "runtime/clock.hpp"
#include "runtime/cuda_event.hpp"

namespace gyre {
namespace GYRE_FILE {

using Marks = test::GpuTest;

/// The clocks of a device and its host may run apart by this share: quartz is good to a tenth.
constexpr double clock_drift = 1e-3;

void pause(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

/// Something that was reached between two times of the host.
struct Reached {
  MarkPtr mark;
  double earliest = 0, latest = 0;
  double length() const { return latest - earliest; }
};

/// The host waits for the stream after `seconds`, which may be when the mark is reached.
Reached mark_now(Stream& stream, double seconds = 0) {
  Reached reached;
  reached.earliest = monotonic_seconds();
  reached.mark = stream.mark();
  pause(seconds);
  stream.synchronize();
  reached.latest = monotonic_seconds();
  return reached;
}

/// The host's clock is read some time after the first origin is reached, within the first mark's
/// length: all marks are late by as much.
void expect_distance(const Reached& first, const Reached& second) {
  const double distance = second.mark->seconds() - first.mark->seconds();
  EXPECT_GE(distance, (second.earliest - first.latest) * (1 - clock_drift));
  EXPECT_LE(distance, (second.latest - first.earliest) * (1 + clock_drift));
}

TEST_F(Marks, FarApartFollowTheHostsClock) {
  struct Pause {
    double before, behind;
  };
  std::vector<Reached> all;
  // New origins after 0.25 s; one of them is reached later than it is made.
  for (const Pause& p : {Pause{0, 0}, {0.01, 0}, {0.3, 0.05}, {0.01, 0}, {0.3, 0}, {0.55, 0.01}}) {
    pause(p.before);
    all.push_back(mark_now(stream(), p.behind));
  }
  // Nobody has asked yet; ask for one in the middle before the last and the first.
  expect_distance(all[2], all[4]);
  for (size_t j = all.size(); j-- > 0;)
    for (size_t i = 0; i < j; ++i) {
      SCOPED_TRACE(testing::Message() << "marks " << i << " and " << j);
      expect_distance(all[i], all[j]);
      EXPECT_LT(all[i].mark->seconds(), all[j].mark->seconds());
    }
  EXPECT_GE(all[0].mark->seconds(), all[0].earliest);
  EXPECT_LE(all[0].mark->seconds(), all[0].latest + all[0].length());
}

TEST_F(Marks, HaveANewOriginFromTimeToTime) {
  const std::shared_ptr<ClockOrigin> first = next_origin(stream(), nullptr);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(next_origin(stream(), first), first);
  pause(0.3);
  const std::shared_ptr<ClockOrigin> second = next_origin(stream(), first);
  EXPECT_NE(second, first);
  EXPECT_EQ(first.use_count(), 2) << "the second is not measured from the first";
  EXPECT_EQ(next_origin(stream(), second), second);
  stream().synchronize();
  EXPECT_GT(second->seconds(), first->seconds());
}

#ifdef GYRE_SOFTGPU
TEST_F(Marks, DoNotWait) {  // the software GPU works when it is waited for, and not before
  (void)stream().mark();    // the first one does
  Buffer<unsigned char> pinned(1, MemorySpace::pinned);
  pinned[0] = 1;
  for (const double seconds : {0.0, 0.3}) {  // with the origin that is there, and a new one
    pause(seconds);
    stream().fill(pinned.data(), std::byte{2}, 1);
    const MarkPtr mark = stream().mark();
    EXPECT_EQ(pinned[0], 1);
    stream().synchronize();
    EXPECT_EQ(pinned[0], 2);
    pinned[0] = 1;
  }
}
#endif

TEST_F(Marks, OutliveTheirStream) {
  std::unique_ptr<Stream> short_lived = make_cuda_stream();
  Reached first = mark_now(*short_lived);
  pause(0.3);
  const Reached second = mark_now(*short_lived);
  short_lived.reset();
  first.mark.reset();
  const double drift = clock_drift * (second.latest - first.earliest);
  EXPECT_GE(second.mark->seconds(), second.earliest - drift);
  EXPECT_LE(second.mark->seconds(), second.latest + first.length() + drift);
}

TEST_F(Marks, OriginsAreMeasuredFromTheOnesBefore) {
  auto first = std::make_shared<ClockOrigin>(stream());
  pause(0.05);
  const double earliest = monotonic_seconds();
  auto second = std::make_shared<ClockOrigin>(stream(), first);
  EXPECT_GE(second->made(), earliest);
  EXPECT_LE(second->made(), monotonic_seconds());
  stream().synchronize();
  const double whole = second->event().seconds_since(first->event());
  EXPECT_GT(whole, 0);
  EXPECT_EQ(first->seconds(), first->made());
  EXPECT_EQ(second->seconds(), first->seconds() + whole);
  EXPECT_EQ(first.use_count(), 1) << "still kept by the one behind it";
}

/// Runs in a thread with a stack of 256 KiB, in which recursion does not come far.
void with_small_stack(std::function<void()> run) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, size_t{256} << 10), 0);
  const auto start = [](void* what) -> void* {
    (*static_cast<std::function<void()>*>(what))();
    return nullptr;
  };
  pthread_t thread{};
  ASSERT_EQ(pthread_create(&thread, &attributes, start, &run), 0);
  ASSERT_EQ(pthread_join(thread, nullptr), 0);
  ASSERT_EQ(pthread_attr_destroy(&attributes), 0);
}

TEST_F(Marks, LongChainsOfOriginsNeedNoStack) {
  constexpr int count = 20000;  // an hour and a half of marks that nobody asks
  for (const bool asked : {true, false}) {
    const auto first = std::make_shared<ClockOrigin>(stream());
    std::shared_ptr<ClockOrigin> last = first;
    for (int i = 0; i < count; ++i) last = std::make_shared<ClockOrigin>(stream(), last);
    stream().synchronize();
    double seconds = monotonic_seconds();
    with_small_stack([&] {
      if (asked) seconds = last->seconds();
      last.reset();
    });
    EXPECT_GT(seconds, first->seconds());
    EXPECT_EQ(first.use_count(), 1) << "still kept";
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
