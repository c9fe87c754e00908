#include "runtime/process.hpp"

#include <fmt/format.h>
#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>

namespace gyre {
namespace {

int first_stdout_error = 0;

/// Writes at most PIPE_BUF bytes, which a pipe that poll() reports as writable accepts at once.
ssize_t write_some(int descriptor, std::string_view text, int patience_ms) {
  pollfd end{descriptor, POLLOUT, 0};
  const int ready = poll(&end, 1, patience_ms);
  if (ready == 0) errno = EAGAIN;
  if (ready <= 0) return -1;
  return write(descriptor, text.data(), std::min<size_t>(text.size(), PIPE_BUF));
}

int write_within(int descriptor, std::string_view text, int patience_ms) {
  while (!text.empty()) {
    const ssize_t written = write_some(descriptor, text, patience_ms);
    if (written >= 0)
      text.remove_prefix(written);
    else if (errno != EINTR && (errno != EAGAIN || patience_ms >= 0))
      return errno;
  }
  return 0;
}

}  // namespace

char process_state(int64_t pid) {
  std::ifstream stat(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(stat, line))  // without /proc, or a free descriptor: asks the kernel
    return kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM ? 'R' : '\0';
  const size_t end = line.rfind(')');  // of the program's name; " S 123 ..." follows
  return end == std::string::npos || end + 2 >= line.size() ? '\0' : line[end + 2];
}

void write_diagnostic(std::string_view text, int patience_ms) {
  const int before = errno;
  write_within(STDERR_FILENO, text, patience_ms);
  errno = before;
}

void write_stdout(std::string_view text) {
  if (first_stdout_error == 0) first_stdout_error = write_all(STDOUT_FILENO, text);
}

int stdout_error() {
  return first_stdout_error;
}

int write_all(int descriptor, std::string_view text) {
  return write_within(descriptor, text, -1);
}

}  // namespace gyre
