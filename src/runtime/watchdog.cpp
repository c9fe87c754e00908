#include "runtime/watchdog.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <optional>
#include <thread>

#include "core/error.hpp"
#include "runtime/host.hpp"
#include "runtime/process.hpp"
#include "runtime/surroundings.hpp"

namespace gyre {
namespace {

using Clock = std::chrono::steady_clock;

struct Wait {
  std::string what;
  std::vector<int> peers;
  Clock::time_point since;
};

struct State {
  std::mutex mutex;
  std::condition_variable wake;
  bool running = false;
  bool finishing = false;
  std::thread thread;
  std::string program;
  int world_rank = 0;
  std::vector<PeerProcess> peers;
  std::string step = "start-up";
  std::vector<Wait> waits;
  std::optional<Clock::time_point> signalled;  // when the thread first saw a signal
};

State& state() {
  static State* instance = new State;  // never destroyed: the thread may outlive static objects
  return *instance;
}
std::atomic<double> timeout_seconds{0};
std::atomic<int> caught_signal{0};
thread_local bool is_watchdog = false;
void (*end_all_ranks)(int code) = nullptr;

/// SIGTERM: the launcher or the scheduler ends the run. SIGUSR1: MPICH's launcher reports a dead
/// rank (under -disable-auto-cleanup; otherwise it kills all ranks at once). SIGABRT: a library
/// gave up, as UCX does when a peer has died. The watchdog thread reports the reason and ends the
/// process; an aborting thread must not return. If the watchdog thread itself aborts, the process
/// ends here.
void on_signal(int signal) {
  caught_signal = signal;
  if (signal != SIGABRT) return;
  if (is_watchdog) _exit(static_cast<int>(ExitCode::runtime));
  for (;;) pause();
}

bool is_gone(char letter) {
  return letter == 0 || letter == 'Z' || letter == 'X';
}

std::string describe(const PeerProcess& peer) {
  std::string condition = "on another host";
  if (peer.host == host_name()) {
    const char letter = process_state(peer.pid);
    if (is_gone(letter))
      condition = "gone";
    else if (letter == 'T' || letter == 't')
      condition = "stopped";
    else
      condition = "running";
  }
  return fmt::format("rank {} ({}, pid {}: {})", peer.world_rank, peer.host, peer.pid, condition);
}

std::string report(const State& s, const Wait& wait, const std::string& headline) {
  std::string text = fmt::format("{}: rank {} ({}, pid {}): {}\n", s.program, s.world_rank,
                                 host_name(), getpid(), headline);
  text += fmt::format("{}: rank {}:   step '{}', waiting for '{}'\n", s.program, s.world_rank,
                      s.step, wait.what);
  text += fmt::format("{}: rank {}:   peers:", s.program, s.world_rank);
  bool any = false;
  for (const PeerProcess& peer : s.peers) {
    const bool named = wait.peers.empty() || std::find(wait.peers.begin(), wait.peers.end(),
                                                       peer.world_rank) != wait.peers.end();
    if (!named || peer.world_rank == s.world_rank) continue;
    text += (any ? ", " : " ") + describe(peer);
    any = true;
  }
  return text + (any ? "\n" : " none\n");
}

/// Publishes the text that a supervisor reports if this process dies. Requires the lock.
void publish(const State& s) {
  surroundings().wait(s.step, s.waits.empty() ? std::string_view() : s.waits.back().what);
}

/// Reports and ends the process. Ranks detect the same hang moments apart, and a launcher kills the
/// others when one has ended. The pause gives them time to report too.
void end_process(const State& s, std::unique_lock<std::mutex>& lock, const Wait& wait,
                 const std::string& headline, ExitCode code) {
  const std::string text = report(s, wait, headline);
  lock.unlock();
  write_diagnostic(text);
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  if (end_all_ranks != nullptr) end_all_ranks(static_cast<int>(code));
  _exit(static_cast<int>(code));
}

/// "rank 2 has died (host, pid 17)" for a peer of this host; "" if all live.
std::string dead_peer(const State& s) {
  const std::string host = host_name();
  for (const PeerProcess& peer : s.peers)
    if (peer.world_rank != s.world_rank && peer.host == host && is_gone(process_state(peer.pid)))
      return fmt::format("rank {} has died ({}, pid {})", peer.world_rank, host, peer.pid);
  return "";
}

void end_after_signal(const State& s, std::unique_lock<std::mutex>& lock, int signal) {
  const std::string dead = dead_peer(s);
  const std::string why = signal == SIGTERM   ? "told to end (SIGTERM)"
                          : signal == SIGUSR1 ? "the launcher reports a failure"
                                              : "a library called abort()";
  end_process(s, lock, s.waits.empty() ? Wait{"nothing: it was computing", {}, {}} : s.waits.back(),
              why + (dead.empty() ? "" : "; ") + dead, ExitCode::runtime);
}

/// Whether the report of a signal should wait for the next inspection. When a peer dies, its memory
/// vanishes a moment before its process does, and a library may abort in between.
bool look_again(State& s, int signal) {
  if (!s.signalled) s.signalled = Clock::now();
  return signal == SIGABRT && dead_peer(s).empty() &&
         Clock::now() - *s.signalled < std::chrono::seconds(1);
}

/// Whether to ignore a signal; an abort of a library is never ignored.
bool ignored(const State& s, int signal) {
  return s.finishing && signal != SIGABRT;
}

void inspect(State& s, std::unique_lock<std::mutex>& lock) {
  if (const int signal = caught_signal.load(); signal != 0 && !ignored(s, signal)) {
    if (look_again(s, signal)) return;
    end_after_signal(s, lock, signal);
  }
  if (s.waits.empty()) return;
  const Wait wait = s.waits.back();
  const double waited = std::chrono::duration<double>(Clock::now() - wait.since).count();
  const double limit = timeout_seconds.load();
  if (limit > 0 && waited > limit)
    end_process(s, lock, wait, fmt::format("timeout after {:.3g} s without progress", limit),
                ExitCode::timeout);
  if (waited < 0.2) return;
  if (const std::string dead = dead_peer(s); !dead.empty())
    end_process(s, lock, wait, dead, ExitCode::runtime);
}

/// Prevents a deadlock in a child that is forked while another thread holds the lock.
void hold_lock_across_forks() {
  static const int result = pthread_atfork(
      [] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, [] { state().mutex.unlock(); });
  GYRE_CHECK(result == 0, "pthread_atfork: error {}", result);
}

void watch() {
  is_watchdog = true;
  State& s = state();
  std::unique_lock lock(s.mutex);
  while (s.running) {
    s.wake.wait_for(lock, std::chrono::milliseconds(100));
    if (s.running) inspect(s, lock);
  }
}

}  // namespace

void Watchdog::start(std::string program, int world_rank, std::vector<PeerProcess> peers,
                     double timeout, void (*end_all)(int code)) {
  State& s = state();
  timeout_seconds = timeout;
  end_all_ranks = end_all;
  hold_lock_across_forks();
  std::lock_guard lock(s.mutex);
  s.program = std::move(program);
  s.world_rank = world_rank;
  s.peers = std::move(peers);
  if (s.running) return;
  s.running = true;
  publish(s);
  s.thread = std::thread(watch);
  std::signal(SIGTERM, on_signal);
  std::signal(SIGUSR1, on_signal);
  std::signal(SIGABRT, on_signal);
}

void Watchdog::set_timeout(double seconds) {
  timeout_seconds = seconds;
  surroundings().set_timeout(seconds);
}

void Watchdog::begin_to_finish() {
  State& s = state();
  std::unique_lock lock(s.mutex);
  while (caught_signal != 0) {  // the watchdog thread ends the process
    lock.unlock();
    pause();
    lock.lock();
  }
  s.finishing = true;
}

void Watchdog::stop() {
  State& s = state();
  bool finished = false;
  {
    std::lock_guard lock(s.mutex);
    if (!s.running) return;
    s.running = false;
    finished = s.finishing;
  }
  std::signal(SIGTERM, finished ? SIG_IGN : SIG_DFL);
  std::signal(SIGUSR1, finished ? SIG_IGN : SIG_DFL);
  std::signal(SIGABRT, SIG_DFL);
  s.wake.notify_all();
  s.thread.join();
}

WaitScope::WaitScope(std::string_view what, std::vector<int> peers) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.waits.push_back({std::string(what), std::move(peers), Clock::now()});
  publish(s);
}

WaitScope::~WaitScope() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.waits.pop_back();
  publish(s);
}

std::string current_step() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  return s.step;
}

void set_current_step(std::string step) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.step = std::move(step);
  publish(s);
}

}  // namespace gyre
