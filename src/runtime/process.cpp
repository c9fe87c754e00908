#include "runtime/process.hpp"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <spawn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>

#include "core/error.hpp"

namespace gyre {
namespace {

int first_stdout_error = 0;

/// Replaces each closed standard stream by one that cannot be written.
void open_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(stream, F_GETFD) < 0) open("/dev/null", O_RDONLY);
}

void end_as_documented(int code, void*) {
  if (!is_exit_code(code)) _exit(static_cast<int>(ExitCode::runtime));
}

void on_abort(int) {
  write_diagnostic(program_invocation_short_name);
  write_diagnostic(": error: a library called abort()\n");
  _exit(static_cast<int>(ExitCode::runtime));
}

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

void prepare_process() {
  open_standard_streams();
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGCHLD, SIG_DFL);
  // Under a launcher, the supervisor reports which signal ended a rank.
  if (std::getenv("PMI_RANK") == nullptr) std::signal(SIGABRT, on_abort);
  on_exit(end_as_documented, nullptr);
}

Guard start_guard(std::string name, const std::string& script, std::vector<std::string> arguments) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return {-1, errno};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[0], STDIN_FILENO);
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO})
    posix_spawn_file_actions_addopen(&actions, stream, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
  std::string text = "trap '' HUP INT TERM USR1; read -r end_of_pipe\n" + script;
  char shell[] = "/bin/sh", option[] = "-c";
  char locale[] = "LC_ALL=C", search[] = "PATH=/usr/bin:/bin";
  std::vector<char*> words = {shell, option, text.data(), name.data()};
  for (std::string& argument : arguments) words.push_back(argument.data());
  words.push_back(nullptr);
  char* environment[] = {locale, search, nullptr};
  pid_t child = 0;
  const int failed = posix_spawn(&child, shell, &actions, &attributes, words.data(), environment);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  close(ends[0]);
  if (failed == 0) return {ends[1], 0};
  close(ends[1]);
  return {-1, failed == ENOENT ? 0 : failed};
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
