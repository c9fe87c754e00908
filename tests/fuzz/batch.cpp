#include "batch.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <fstream>
#include <optional>

#include "comm/mpi.hpp"
#include "core/error.hpp"
#include "runtime/mpi_env.hpp"
#include "runtime/watchdog.hpp"

namespace gyre::fuzz {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int start_ms = 30000, hang_ms = 6000;  // the watchdog ends a wait after 1 s and a pause
constexpr double watchdog_seconds = 1;
constexpr uint64_t batch = 2000;
constexpr size_t max_found = 100;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Verdict {
  End end;
  std::string message;
};

Verdict attempt(const Target& target, Communicator* comm, const std::string& input,
                const Digests& right) {
  try {
    const Digests got = target.read(comm, input);
    if (right.empty() || std::find(right.begin(), right.end(), got.at(0)) != right.end())
      return {End::accepted, ""};
    return {End::wrong, "other data than was written"};
  } catch (const Error& error) {
    const std::string text = error.what();
    const bool check = text.find("internal check") != std::string::npos;
    return {check && !target.own ? End::other : End::refused, text};
  } catch (const std::exception& error) {
    return {End::other, error.what()};
  } catch (...) {
    return {End::other, "an exception of unknown type"};
  }
}

void send(int pipe, uint64_t index, const Verdict& verdict) {
  std::string message = verdict.message.substr(0, 300);
  std::replace(message.begin(), message.end(), '\n', ' ');
  const std::string line = fmt::format("{} {} {}\n", index, static_cast<int>(verdict.end), message);
  if (write(pipe, line.data(), line.size()) < 0) _exit(1);
}

/// Address sanitizers need all addresses; elsewhere a wrong size must not take all memory.
void limit_resources() {
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
#ifndef __SANITIZE_ADDRESS__
  const rlimit memory{rlim_t{6} << 30, rlim_t{6} << 30};
  setrlimit(RLIMIT_AS, &memory);
#endif
}

/// The child process: cases from `first` on. MPI starts here: it does not
/// survive a fork.
[[noreturn]] void run_batch(const Target& target, const Cases& cases, uint64_t first, uint64_t last,
                            int pipe, const std::string& scratch) {
  const int log = open((scratch + "/stderr").c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
  dup2(log, STDERR_FILENO);
  dup2(log, STDOUT_FILENO);  // or what outlives this process would keep fuzz.py waiting
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  int argc = 0;
  char** argv = nullptr;
  std::optional<MpiEnvironment> mpi;
  std::unique_ptr<Communicator> comm;
  if (target.file) comm = make_mpi_communicator(mpi.emplace(argc, argv, "fuzz").world());
  Watchdog::set_timeout(watchdog_seconds);
  limit_resources();
  Digests right;
  if (cases.right) right = cases.right(comm.get());
  const std::string path = scratch + "/case.h5";
  for (uint64_t i = first; i < last; ++i) {
    std::string input = cases.input(i);
    if (target.file) {
      std::ofstream(path, std::ios::binary | std::ios::trunc) << input;
      input = path;
    }
    send(pipe, i, attempt(target, comm.get(), input, right));
  }
  _exit(0);
}

/// Lines from a pipe.
class Lines {
 public:
  explicit Lines(int pipe) : pipe_(pipe) {}
  ~Lines() { close(pipe_); }
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  enum class State { line, end, silence };
  State next(std::string& line, int wait_ms) {
    while (true) {
      if (const size_t end = text_.find('\n'); end != std::string::npos) {
        line = text_.substr(0, end);
        text_.erase(0, end + 1);
        return State::line;
      }
      pollfd ready{pipe_, POLLIN, 0};
      if (poll(&ready, 1, wait_ms) == 0) return State::silence;
      std::array<char, 65536> block;
      const ssize_t got = read(pipe_, block.data(), block.size());
      if (got <= 0) return State::end;
      text_.append(block.data(), static_cast<size_t>(got));
    }
  }

 private:
  int pipe_;
  std::string text_;
};

/// What a sanitizer or the watchdog said, or the last line.
std::string last_words(const std::string& scratch) {
  std::ifstream log(scratch + "/stderr");
  std::string words;
  for (std::string line; std::getline(log, line);) {
    for (const char* telling : {"ERROR: ", "runtime error", "waiting for"})
      if (line.find(telling) != std::string::npos) return line;
    if (!line.empty()) words = line;
  }
  return words;
}

/// Whether io/trust/reading's handler has named the file whose damage crashed HDF5.
bool named_crash(const std::string& scratch) {
  const std::string words = fmt::format("reading '{}/case.h5' crashes HDF5", scratch);
  std::ifstream log(scratch + "/stderr");
  for (std::string line; std::getline(log, line);)
    if (line.find(words) != std::string::npos) return true;
  return false;
}

Verdict verdict_of_end(int status, bool silent, const std::string& scratch) {
  if (silent) return {End::hang, fmt::format("no end within {} s", hang_ms / 1000)};
  if (WIFSIGNALED(status))
    return {End::signal, fmt::format("{}; {}", strsignal(WTERMSIG(status)), last_words(scratch))};
  const int code = WEXITSTATUS(status);
  if (code == static_cast<int>(ExitCode::timeout)) return {End::timeout, last_words(scratch)};
  if (code == static_cast<int>(ExitCode::runtime) && named_crash(scratch))
    return {End::refused, ""};
  return {End::signal, fmt::format("ended with {}; {}", code, last_words(scratch))};
}

void add(Tally& tally, uint64_t index, const Verdict& verdict) {
  ++tally.cases;
  ++tally.counts[static_cast<int>(verdict.end)];
  tally.all.push_back(verdict.end);
  const bool good = verdict.end == End::accepted || verdict.end == End::refused;
  if (!good && tally.found.size() < max_found)
    tally.found.push_back({index, verdict.end, verdict.message});
}

/// One child; returns the first case that it has not done.
uint64_t run_child(const Target& target, const Cases& cases, uint64_t first, uint64_t last,
                   Clock::time_point start, double seconds, const std::string& scratch,
                   Tally& tally) {
  int ends_of_pipe[2];
  if (pipe2(ends_of_pipe, O_CLOEXEC) != 0) throw_runtime("no pipe");
  const pid_t child = fork();
  if (child < 0) throw_runtime("no child process");  // and no signal to process -1
  if (child == 0) run_batch(target, cases, first, last, ends_of_pipe[1], scratch);
  close(ends_of_pipe[1]);
  Lines lines(ends_of_pipe[0]);
  uint64_t next = first;
  std::string line;
  Lines::State state = Lines::State::line;
  bool in_time = true;
  while (next < last && in_time) {
    state = lines.next(line, next == first ? start_ms : hang_ms);
    if (state != Lines::State::line) break;
    const size_t space = line.find(' ');
    add(tally, next++, {static_cast<End>(line[space + 1] - '0'), line.substr(space + 3)});
    in_time = since(start) < seconds;
  }
  if (next < last) kill(child, state == Lines::State::end ? 0 : SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  kill(-child, SIGKILL);  // a child of its own that it left behind
  if (next < last && in_time)
    add(tally, next++, verdict_of_end(status, state == Lines::State::silence, scratch));
  return next;
}

}  // namespace

std::string to_string(End end) {
  static const char* const names[ends] = {"accepted", "refused", "timeout", "signal",
                                          "hang",     "other",   "wrong"};
  return names[static_cast<int>(end)];
}

Tally run_cases(const Target& target, const Cases& cases, uint64_t count, double seconds,
                const std::string& scratch) {
  Tally tally;
  const Clock::time_point start = Clock::now();
  for (uint64_t next = 0; next < count && since(start) < seconds;)
    next = run_child(target, cases, next, std::min(count, next + batch), start, seconds, scratch,
                     tally);
  return tally;
}

}  // namespace gyre::fuzz
