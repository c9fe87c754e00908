#include "supervision/supervisor.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "core/error.hpp"
#include "runtime/host.hpp"
#include "runtime/process.hpp"
#include "runtime/surroundings.hpp"
#include "supervision/guard.hpp"
#include "supervision/launcher.hpp"

namespace gyre {
namespace {

using Clock = std::chrono::steady_clock;

/// Written by a rank and read by its supervisor, even after the rank has died: every text must end
/// with a zero byte at all times.
struct RankState {
  std::atomic<RankPhase> phase;
  std::atomic<double> timeout_seconds;
  char program[64];
  char doing[256];
};

RankState* shared = nullptr;
volatile pid_t worker = 0;  // the rank; set in the supervisor

template <size_t n>
void copy_text(char (&to)[n], std::string_view text) {
  const size_t length = std::min(text.size(), n - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

void publish(std::string_view step, std::string_view waiting_for) {
  std::string text = "step '" + std::string(step) + "'";
  if (!waiting_for.empty()) text += ", waiting for '" + std::string(waiting_for) + "'";
  copy_text(shared->doing, text);
}

void forward(int signal) {
  if (worker > 0) kill(worker, signal);
}

const char* rank_name() {
  const char* rank = std::getenv("PMI_RANK");
  return rank != nullptr ? rank : "?";
}

void say(const std::string& what) {
  write_diagnostic(fmt::format("{}: rank {} ({}, pid {}) {}; {}\n", shared->program, rank_name(),
                               host_name(), static_cast<int>(worker), what, shared->doing));
}

/// Ends all ranks, or only this supervisor's rank if the launcher does not respond. Waits first:
/// ranks and supervisors notice the same failure moments apart, and each must name its rank before
/// the first ends all.
[[noreturn]] void end_run(ExitCode code, useconds_t pause_us) {
  timespec left{pause_us / 1'000'000, pause_us % 1'000'000 * 1000L};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
  wait_for_launcher_to_read();
  end_run_through_launcher(static_cast<int>(code));
  kill(worker, SIGKILL);
  _exit(static_cast<int>(code));
}

/// Ends the run if the rank has been stopped, or in MPI_Init or MPI_Finalize, for too long. Counts
/// only time in which this process ran: a suspended job is no hang.
class Patience {
 public:
  void check() {
    const Clock::time_point now = Clock::now();
    const double passed = std::min(1.0, std::chrono::duration<double>(now - last_).count());
    last_ = now;
    const RankPhase phase = shared->phase;
    const bool is_stopped = process_state(worker) == 'T';
    in_phase_ = phase == phase_ ? in_phase_ + passed : 0;
    stopped_ = is_stopped ? stopped_ + passed : 0;
    phase_ = phase;
    if (phase != RankPhase::finalising && launcher_is_gone()) {
      say("has lost its launcher");
      end_run(ExitCode::runtime, 200'000);
    }
    const double limit = shared->timeout_seconds;
    if (limit <= 0) return;
    // The watchdogs of running ranks report more about a stopped rank, so they go first.
    if (stopped_ > limit + 2) {
      say(fmt::format("has been stopped for {:.3g} s", stopped_));
      end_run(ExitCode::timeout, 1'700'000);
    }
    if (phase != RankPhase::running && in_phase_ > limit) {
      say(fmt::format("has been in {} for more than {:.3g} s, {}",
                      phase == RankPhase::starting ? "MPI_Init" : "MPI_Finalize", limit,
                      is_stopped ? "stopped" : "running"));
      end_run(ExitCode::timeout, 1'700'000);
    }
  }

 private:
  Clock::time_point last_ = Clock::now();
  RankPhase phase_ = RankPhase::starting;
  double in_phase_ = 0, stopped_ = 0;  // seconds
};

constexpr int forwarded_signals[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGCONT};

/// `before`: signals that were blocked before the fork.
[[noreturn]] void supervise(const sigset_t& before, LauncherRelay& relay) {
  for (const int signal : forwarded_signals) std::signal(signal, forward);
  std::signal(SIGCHLD, [](int) {});  // interrupts a pause
  sigset_t blocked = before;
  sigaddset(&blocked, SIGCHLD);
  sigprocmask(SIG_SETMASK, &blocked, nullptr);
  relay.enter_supervisor();
  leave_guard();
  Patience patience;
  int status = 0;
  for (bool ended = false; !ended;) {
    ended = waitpid(worker, &status, WNOHANG) != 0;
    if (!ended) patience.check();
    // MPI has aborted this rank, for a reason that it has printed, or because another rank has
    // died; that rank's supervisor reports first.
    if (!relay.pass({0, ended ? 0 : 500'000'000}, before)) end_run(ExitCode::runtime, 500'000);
  }
  if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  say(fmt::format("was killed by signal {} ({}){}", signal, strsignal(signal),
                  signal == SIGKILL ? "; out of memory?" : ""));
  // The other ranks notice within half a second, report and end the run, if they can.
  end_run(ExitCode::runtime, shared->phase == RankPhase::running ? 5'200'000 : 200'000);
}

/// Runs in the rank when its supervisor has died; calls only what is safe in a signal handler.
void on_supervisor_death(int) {
  // Reports at once: Hydra ends the run with exit code 9 when it sees the dead supervisor, and it
  // checks on every event. The report and the abort message reach it first if sent together.
  char line[512] = "";
  const char* parts[] = {shared->program, ": rank ", rank_name(), ": its supervisor has died; ",
                         shared->doing,   "\n"};
  for (const char* part : parts) std::strncat(line, part, sizeof(line) - std::strlen(line) - 1);
  write_diagnostic(line);
  end_run_through_launcher(static_cast<int>(ExitCode::runtime));
  _exit(static_cast<int>(ExitCode::runtime));
}

[[noreturn]] void fail_to_start(const char* call) {
  throw_runtime("cannot start the process that watches this rank: {}: {}", call,
                std::strerror(errno));
}

/// Makes the rank end when its supervisor dies, and resumes a stopped supervisor: MPI needs the
/// supervisor's relay, and the launcher waits for the supervisor's end. Runs in the rank.
void watch_supervisor(pid_t parent) {
  std::signal(SIGRTMIN, on_supervisor_death);
  prctl(PR_SET_PDEATHSIG, SIGRTMIN);
  if (getppid() != parent) on_supervisor_death(SIGRTMIN);
  std::thread([parent] {
    while (usleep(100'000) == 0 || errno == EINTR)
      if (process_state(parent) == 'T') kill(parent, SIGCONT);
  }).detach();
}

}  // namespace

void fork_supervised(std::string_view program, double timeout_seconds) {
  void* page =
      mmap(nullptr, sizeof(RankState), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) fail_to_start("mmap");
  shared = new (page) RankState{RankPhase::starting, timeout_seconds, {}, {}};
  copy_text(shared->program, program);
  publish("start-up", "MPI_Init");
  LauncherRelay relay;
  // Blocks signals until the supervisor is ready to wait for the child and to forward signals.
  sigset_t held, before;
  sigemptyset(&held);
  sigaddset(&held, SIGCHLD);
  for (const int signal : forwarded_signals) sigaddset(&held, signal);
  sigprocmask(SIG_BLOCK, &held, &before);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child > 0) {
    worker = child;
    supervise(before, relay);
  }
  const int reason = errno;
  sigprocmask(SIG_SETMASK, &before, nullptr);
  errno = reason;
  if (child < 0) fail_to_start("fork");
  relay.enter_rank();
  surroundings().enter = [](RankPhase phase) { shared->phase = phase; };
  surroundings().wait = publish;
  surroundings().set_timeout = [](double seconds) { shared->timeout_seconds = seconds; };
  watch_supervisor(parent);
}

bool has_supervisor() {
  return shared != nullptr;
}

}  // namespace gyre
