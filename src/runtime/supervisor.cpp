#include "runtime/supervisor.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "core/error.hpp"
#include "runtime/host.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

using Clock = std::chrono::steady_clock;

/// Written by a rank, read by its supervisor, which also reads it when the rank is dead: every text
/// ends with a zero byte at all times.
struct RankState {
  std::atomic<RankPhase> phase;
  std::atomic<double> timeout_seconds;
  char program[64];
  char doing[256];
};

RankState* shared = nullptr;
volatile pid_t worker = 0;      // in the supervisor
volatile pid_t supervisor = 0;  // in the rank

template <size_t n>
void copy_text(char (&to)[n], std::string_view text) {
  const size_t length = std::min(text.size(), n - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

void forward(int signal) {
  if (worker > 0) kill(worker, signal);
}

bool traced() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (word == "TracerPid:") return status >> word && word != "0";
  return false;
}

const char* rank_name() {
  const char* rank = std::getenv("PMI_RANK");
  return rank != nullptr ? rank : "?";
}

int launcher_connection() {
  const char* text = std::getenv("PMI_FD");
  return text != nullptr ? std::atoi(text) : -1;
}

bool launcher_is_gone() {
  pollfd connection{launcher_connection(), 0, 0};
  return connection.fd >= 0 && poll(&connection, 1, 0) > 0 &&
         (connection.revents & (POLLHUP | POLLERR)) != 0;
}

pid_t launcher = 0;  // the parent of all supervisors of this host

/// Files of shared memory that ranks of this run map: MPI's and UCX's own, which stay when a rank
/// is killed before they are unlinked. Nobody but this run knows their names.
std::set<std::string> shared_memory;

void note_shared_memory(pid_t process) {
  std::ifstream maps(fmt::format("/proc/{}/maps", static_cast<int>(process)));
  for (std::string line; std::getline(maps, line);) {
    const size_t at = line.find("/dev/shm/");
    if (at != std::string::npos && !line.ends_with(" (deleted)"))
      shared_memory.insert(line.substr(at));
  }
}

/// State letter and parent of a process of this host; zeros when there is none.
struct ProcessStatus {
  char state = 0;
  pid_t parent = 0;
};

ProcessStatus status_of(int64_t process) {
  std::ifstream stat(fmt::format("/proc/{}/stat", process));
  std::string line;
  std::getline(stat, line);
  ProcessStatus status;
  const size_t end = line.rfind(')');  // of the program's name; then " S 123 ..."
  if (end != std::string::npos)
    std::sscanf(line.c_str() + end + 1, " %c %d", &status.state, &status.parent);
  return status;
}

/// Of all ranks of this host: they are about to end, too.
void unlink_shared_memory() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const pid_t process = std::atoi(entry.path().filename().c_str());
    if (process > 0 && status_of(status_of(process).parent).parent == launcher)
      note_shared_memory(process);
  }
  for (const std::string& file : shared_memory) unlink(file.c_str());
}

void say(const std::string& what) {
  fmt::print(stderr, "{}: rank {} ({}, pid {}) {}; {}\n", shared->program, rank_name(), host_name(),
             static_cast<int>(worker), what, shared->doing);
  std::fflush(stderr);
}

/// Ends all ranks; this supervisor's own when the launcher does not.
[[noreturn]] void end_run(ExitCode code) {
  if (end_run_through_launcher(static_cast<int>(code))) sleep(2);  // and is killed meanwhile
  kill(worker, SIGKILL);
  _exit(static_cast<int>(code));
}

/// Supervisors notice the same hang moments apart; each names its own rank before the first ends
/// all.
[[noreturn]] void end_after_reports(ExitCode code) {
  unlink_shared_memory();
  usleep(1500000);
  end_run(code);
}

/// Ends the run when the rank has been stopped for too long, or in MPI_Init or MPI_Finalize. Only
/// time is counted in which this process ran: a suspended job is no hang.
class Patience {
 public:
  void check() {
    const Clock::time_point now = Clock::now();
    const double passed = std::min(1.0, std::chrono::duration<double>(now - last_).count());
    last_ = now;
    const RankPhase phase = shared->phase;
    note_shared_memory(worker);
    const bool is_stopped = process_state(worker) == 'T';
    in_phase_ = phase == phase_ ? in_phase_ + passed : 0;
    stopped_ = is_stopped ? stopped_ + passed : 0;
    phase_ = phase;
    if (phase != RankPhase::finalising && launcher_is_gone()) {
      say("has lost its launcher");
      end_run(ExitCode::runtime);
    }
    const double limit = shared->timeout_seconds;
    if (limit <= 0) return;
    // Of a rank that runs, the others report more: they come first.
    if (stopped_ > limit + 2) {
      say(fmt::format("has been stopped for {:.3g} s", stopped_));
      end_after_reports(ExitCode::timeout);
    }
    if (phase != RankPhase::running && in_phase_ > limit) {
      say(fmt::format("has been in {} for more than {:.3g} s, {}",
                      phase == RankPhase::starting ? "MPI_Init" : "MPI_Finalize", limit,
                      is_stopped ? "stopped" : "running"));
      end_after_reports(ExitCode::timeout);
    }
  }

 private:
  Clock::time_point last_ = Clock::now();
  RankPhase phase_ = RankPhase::starting;
  double in_phase_ = 0, stopped_ = 0;  // seconds
};

constexpr int forwarded_signals[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGCONT};

/// `before`: the signals that were blocked before the fork.
[[noreturn]] void supervise(const sigset_t& before) {
  for (const int signal : forwarded_signals) std::signal(signal, forward);
  sigset_t child_ended, blocked = before;
  sigemptyset(&child_ended);
  sigaddset(&child_ended, SIGCHLD);
  sigaddset(&blocked, SIGCHLD);
  sigprocmask(SIG_SETMASK, &blocked, nullptr);
  Patience patience;
  int status = 0;
  while (waitpid(worker, &status, WNOHANG) == 0) {
    patience.check();
    // Files of shared memory come and go while MPI starts.
    const timespec pause{0, shared->phase == RankPhase::starting ? 10'000'000 : 500'000'000};
    sigtimedwait(&child_ended, nullptr, &pause);
  }
  if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  say(fmt::format("was killed by signal {} ({}){}", signal, strsignal(signal),
                  signal == SIGKILL ? "; out of memory?" : ""));
  unlink_shared_memory();
  // The other ranks notice within half a second, report and end the run, unless they cannot.
  if (shared->phase == RankPhase::running) sleep(5);
  end_run(ExitCode::runtime);
}

/// The value of the option that says how long one wait may last. It counts from the start, before
/// options can be read in order; where it is given otherwise, or wrongly, the default counts.
double timeout_of(int argc, char** argv) {
  double seconds = default_timeout_seconds;
  const size_t length = std::strlen(timeout_option);
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], timeout_option, length) != 0) continue;
    if (argv[i][length] == '=')
      seconds = std::atof(argv[i] + length + 1);
    else if (argv[i][length] == '\0' && i + 1 < argc)
      seconds = std::atof(argv[i + 1]);
  }
  return seconds;
}

/// In the rank, when its supervisor has died: only calls that are safe in a signal handler.
void on_supervisor_death(int) {
  // One write: the launcher may end this process at any moment.
  char line[512] = "";
  const char* parts[] = {shared->program, ": rank ", rank_name(), ": its supervisor has died; ",
                         shared->doing,   "\n"};
  for (const char* part : parts) std::strncat(line, part, sizeof(line) - std::strlen(line) - 1);
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line, std::strlen(line));
  end_run_through_launcher(static_cast<int>(ExitCode::runtime));
  _exit(static_cast<int>(ExitCode::runtime));
}

/// In the rank: it ends when its supervisor does.
void watch_supervisor(pid_t parent) {
  supervisor = parent;
  std::signal(SIGRTMIN, on_supervisor_death);
  prctl(PR_SET_PDEATHSIG, SIGRTMIN);
  if (getppid() != parent) on_supervisor_death(SIGRTMIN);
}

}  // namespace

void start_supervised(std::string_view program, int argc, char** argv) {
  if (shared != nullptr || std::getenv("PMI_RANK") == nullptr || traced()) return;
  void* page =
      mmap(nullptr, sizeof(RankState), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;  // unsupervised is better than not at all
  shared = new (page) RankState{RankPhase::starting, timeout_of(argc, argv), {}, {}};
  copy_text(shared->program, program);
  tell_supervisor("start-up", "MPI_Init");
  // Until the supervisor is ready to wait for the child's end and to forward what comes.
  sigset_t held, before;
  sigemptyset(&held);
  sigaddset(&held, SIGCHLD);
  for (const int signal : forwarded_signals) sigaddset(&held, signal);
  sigprocmask(SIG_BLOCK, &held, &before);
  launcher = getppid();
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child > 0) {
    worker = child;
    supervise(before);
  }
  sigprocmask(SIG_SETMASK, &before, nullptr);
  if (child == 0)
    watch_supervisor(parent);
  else
    shared = nullptr;  // it could not fork
}

void tell_supervisor(RankPhase phase) {
  if (shared != nullptr) shared->phase = phase;
}

void tell_supervisor(std::string_view step, std::string_view waiting_for) {
  if (shared == nullptr) return;
  std::string text = "step '" + std::string(step) + "'";
  if (!waiting_for.empty()) text += ", waiting for '" + std::string(waiting_for) + "'";
  copy_text(shared->doing, text);
}

void tell_supervisor_timeout(double seconds) {
  if (shared != nullptr) shared->timeout_seconds = seconds;
}

void wake_supervisor() {
  if (supervisor > 0 && process_state(supervisor) == 'T') kill(supervisor, SIGCONT);
}

void remove_shared_memory() {
  if (supervisor > 0) unlink_shared_memory();
}

bool end_run_through_launcher(int code) {
  const int connection = launcher_connection();
  if (connection < 0) return false;
  char line[] = "cmd=abort exitcode=0\n";
  line[std::strlen("cmd=abort exitcode=")] = static_cast<char>('0' + code);
  // A socket, of all launchers that were seen; without SIGPIPE when the launcher has gone.
  return send(connection, line, std::strlen(line), MSG_NOSIGNAL) > 0;
}

char process_state(int64_t pid) {
  return status_of(pid).state;
}

}  // namespace gyre
