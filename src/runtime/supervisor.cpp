#include "runtime/supervisor.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "core/error.hpp"

namespace gyre {
namespace {

volatile pid_t worker = 0;

void forward(int signal) {
  if (worker > 0) kill(worker, signal);
}

bool traced() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (word == "TracerPid:") return status >> word && word != "0";
  return false;
}

[[noreturn]] void supervise(pid_t child) {
  worker = child;
  for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGCONT})
    std::signal(signal, forward);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
  const char* rank = std::getenv("PMI_RANK");
  const int signal = WTERMSIG(status);
  std::fprintf(stderr, "rank %s (pid %d) was killed by signal %d (%s)%s\n",
               rank != nullptr ? rank : "?", static_cast<int>(child), signal, strsignal(signal),
               signal == SIGKILL ? "; out of memory?" : "");
  // The other ranks notice within half a second, report and end the run, unless they cannot.
  sleep(5);
  _exit(static_cast<int>(ExitCode::runtime));
}

}  // namespace

void start_supervised() {
  if (std::getenv("PMI_RANK") == nullptr || traced()) return;
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) return;  // unsupervised is better than not at all
  if (child > 0) supervise(child);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(static_cast<int>(ExitCode::runtime));
}

}  // namespace gyre
