#include "runtime/sleep.hpp"

#include <sys/prctl.h>

#include <cerrno>
#include <cmath>
#include <ctime>

namespace gyre {
namespace {

/// Makes timers of this thread expire without slack.
bool make_timers_exact() {
  constexpr unsigned long slack_ns = 1;  // 0 is the default of 50 us
  return prctl(PR_SET_TIMERSLACK, slack_ns, 0UL, 0UL, 0UL) == 0;
}

}  // namespace

void sleep_until(double time) {
  [[maybe_unused]] thread_local const bool exact = make_timers_exact();
  timespec end{};
  const double whole = std::floor(time);
  end.tv_sec = static_cast<time_t>(whole);
  end.tv_nsec = static_cast<long>(1e9 * (time - whole));
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, nullptr) == EINTR) {
  }
}

}  // namespace gyre
