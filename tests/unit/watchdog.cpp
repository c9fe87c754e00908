// Waits are noted by any thread, also in a child that is forked meanwhile, as death tests do.

#include "runtime/watchdog.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

namespace gyre {
namespace GYRE_FILE {

/// Whether the child ends by itself; it is killed otherwise.
bool ends(pid_t child) {
  for (int i = 0; i < 500; ++i) {
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child)
      return WIFEXITED(status) && WEXITSTATUS(status) == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return false;
}

TEST(Watchdog, ChildrenThatAreForkedMeanwhileCanWait) {
  std::atomic<bool> done = false;
  std::thread other([&] {
    while (!done) const WaitScope scope("something");
  });
  bool all = true;
  for (int i = 0; i < 40 && all; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      { const WaitScope scope("in the child"); }
      _exit(0);
    }
    all = child > 0 && ends(child);
  }
  EXPECT_TRUE(all);
  done = true;
  other.join();
}

}  // namespace GYRE_FILE
}  // namespace gyre
