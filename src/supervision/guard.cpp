#include "supervision/guard.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <ctime>
#include <exception>
#include <filesystem>
#include <set>
#include <vector>

#include "core/error.hpp"
#include "supervision/shared_memory.hpp"

namespace gyre {
namespace {

constexpr const char* guard_name = "gyre-guard";
constexpr char guarded = '+', released = '-';  // first byte of a message; its path follows

int to_guard = -1;

/// During its lifetime, ps shows another name in place of this process's command line. Who looks
/// for ranks by their command line thus never finds a guard, not even one that has just been
/// forked.
class ShownName {
 public:
  ShownName(int argc, char** argv, const char* name) {
    prctl(PR_GET_NAME, thread_name_.data());
    prctl(PR_SET_NAME, name);
    if (argc < 1) return;
    shown_ = argv[0];
    char* end = shown_;
    for (int i = 0; i < argc && argv[i] == end; ++i) end += std::strlen(argv[i]) + 1;
    arguments_.assign(shown_, end);
    std::memset(shown_, 0, arguments_.size());
    std::memcpy(shown_, name, std::min(std::strlen(name), arguments_.size() - 1));
  }
  ~ShownName() {
    prctl(PR_SET_NAME, thread_name_.data());
    if (shown_ != nullptr) std::memcpy(shown_, arguments_.data(), arguments_.size());
  }
  ShownName(const ShownName&) = delete;
  ShownName& operator=(const ShownName&) = delete;

 private:
  std::array<char, 16> thread_name_{};
  char* shown_ = nullptr;
  std::vector<char> arguments_;
};

/// Detaches from the rank's terminal and closes its files. `socket` becomes standard input.
void detach(int socket) {
  setsid();
  dup2(socket, STDIN_FILENO);
  const int nowhere = open("/dev/null", O_WRONLY);
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) dup2(nowhere, stream);
  closefrom(STDERR_FILENO + 1);
}

/// Receives messages until the rank has ended. Returns the files that it has not released.
std::set<std::string> follow_rank() {
  std::set<std::string> files;
  std::array<char, PATH_MAX + 1> message;
  while (true) {
    const ssize_t size = recv(STDIN_FILENO, message.data(), message.size(), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return files;
    const std::string path(message.data() + 1, size - 1);
    if (message[0] == guarded)
      files.insert(path);
    else
      files.erase(path);
  }
}

void tell_guard(char what, const std::string& path) {
  if (to_guard < 0) return;
  std::error_code ignored;
  const std::string message = what + std::filesystem::absolute(path, ignored).string();
  // Fails if the guard was killed, without which the run goes on.
  send(to_guard, message.data(), message.size(), MSG_NOSIGNAL);
}

[[noreturn]] void fail_to_start(const char* call, int error) {
  throw_runtime("cannot start the process that removes unfinished outputs: {}: {}", call,
                std::strerror(error));
}

}  // namespace

void start_guard(int argc, char** argv, bool removes_shared_memory) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    fail_to_start("socketpair", errno);
  const pid_t parent = getpid(), launcher = getppid();
  const time_t since = time(nullptr) - 2;  // file timestamps lag behind the clock
  sigset_t all, before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);
  pid_t child = 0;
  {
    const ShownName name(argc, argv, guard_name);
    child = fork();
    if (child == 0) {
      std::set_terminate([] { _exit(1); });
      detach(ends[0]);
      for (const std::string& file : follow_rank()) unlink(file.c_str());
      while (removes_shared_memory && getppid() == parent) usleep(100'000);
      if (removes_shared_memory) remove_shared_memory(since, launcher);
      _exit(0);
    }
  }
  const int error = errno;
  sigprocmask(SIG_SETMASK, &before, nullptr);
  close(ends[0]);
  leave_guard();
  to_guard = ends[1];
  if (child < 0) fail_to_start("fork", error);
}

void leave_guard() {
  if (to_guard >= 0) close(to_guard);
  to_guard = -1;
}

void guard_file(const std::string& path) {
  tell_guard(guarded, path);
}

void release_file(const std::string& path) {
  tell_guard(released, path);
}

}  // namespace gyre
