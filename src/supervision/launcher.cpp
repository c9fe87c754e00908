#include "supervision/launcher.hpp"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/error.hpp"
#include "runtime/process.hpp"

namespace gyre {
namespace {

constexpr char abort_message[] = "cmd=abort";

/// Reads the variable once, because the relay changes it.
int connection() {
  static const int descriptor = [] {
    const char* text = std::getenv("PMI_FD");
    return text != nullptr ? std::atoi(text) : -1;
  }();
  return descriptor;
}

/// Bytes that can be read at once; empty at the end of the connection.
std::string read_some(int from) {
  std::array<char, 8192> block;
  ssize_t got = 0;
  do got = read(from, block.data(), block.size());
  while (got < 0 && errno == EINTR);
  return {block.data(), static_cast<size_t>(got > 0 ? got : 0)};
}

}  // namespace

void end_run_through_launcher(int code) {
  if (connection() < 0) return;
  char line[] = "cmd=abort exitcode=0\n";
  line[std::strlen("cmd=abort exitcode=")] = static_cast<char>('0' + code);
  // All known launchers use a socket; MSG_NOSIGNAL avoids SIGPIPE if the launcher has exited.
  if (send(connection(), line, std::strlen(line), MSG_NOSIGNAL) > 0) sleep(2);
}

bool launcher_is_gone() {
  pollfd end{connection(), 0, 0};
  return end.fd >= 0 && poll(&end, 1, 0) > 0 && (end.revents & (POLLHUP | POLLERR)) != 0;
}

void wait_for_launcher_to_read() {
  if (connection() < 0 || launcher_is_gone()) return;
  for (int tries = 0; tries < 1000; ++tries) {
    int unread = 0;
    for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) {
      int bytes = 0;  // stays 0 if it is not a pipe
      if (ioctl(stream, FIONREAD, &bytes) == 0) unread += bytes;
    }
    if (unread == 0) return;
    usleep(1000);
  }
}

LauncherRelay::LauncherRelay() {
  int ends[2];
  if (connection() < 0) return;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw_runtime("cannot relay between this rank and its launcher: socketpair: {}",
                  std::strerror(errno));
  rank_end_ = ends[0];
  supervisor_end_ = ends[1];
}

void LauncherRelay::enter_rank() {
  // The other end stays open here, because MPI gives up when it is closed, which would be before
  // the rank learns of its supervisor's death.
  if (rank_end_ >= 0) setenv("PMI_FD", std::to_string(rank_end_).c_str(), 1);
}

void LauncherRelay::enter_supervisor() {
  if (rank_end_ >= 0) close(rank_end_);
}

bool LauncherRelay::pass(const timespec& pause, const sigset_t& unblocked) {
  pollfd ends[] = {{rank_open_ ? supervisor_end_ : -1, POLLIN, 0},
                   {launcher_open_ && supervisor_end_ >= 0 ? connection() : -1, POLLIN, 0}};
  if (ppoll(ends, 2, &pause, &unblocked) <= 0) return true;
  if (ends[0].revents != 0) {
    const std::string text = read_some(ends[0].fd);
    rank_open_ = !text.empty();
    if (text.starts_with(abort_message)) return false;
    write_all(connection(), text);  // fails only if the launcher has exited
  }
  if (ends[1].revents != 0) {
    const std::string text = read_some(ends[1].fd);
    launcher_open_ = !text.empty();
    write_all(supervisor_end_, text);
  }
  return true;
}

}  // namespace gyre
