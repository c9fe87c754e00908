#include "report/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>

#include "report/value.hpp"
#include "runtime/clock.hpp"
#include "runtime/process.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

constexpr double first_line_seconds = 5, redraw_seconds = 0.5, line_seconds = 10;

std::string seconds_text(double seconds) {
  if (seconds < 9.95) return fmt::format("{:.2g} s", seconds);
  if (seconds < 100) return fmt::format("{:.0f} s", seconds);
  return fmt::format("{:.0f} min", seconds / 60);
}

}  // namespace

std::string progress_text(int64_t done, int64_t expected, double seconds,
                          const std::string& doing) {
  std::string text =
      fmt::format("{} of {}, {}", done, count_text(expected, "row"), seconds_text(seconds));
  if (done > 0 && done < expected) {
    const double left = seconds / done * (expected - done);
    text +=
        fmt::format(", {} a row, about {} left", seconds_text(seconds / done), seconds_text(left));
  }
  return doing.empty() ? text : text + ": " + doing;
}

Progress::Progress(std::string program, const std::string& mode, bool shows)
    : program_(std::move(program)),
      redraws_(mode == "on" || isatty(STDERR_FILENO) == 1),
      shows_(shows && mode != "off") {}

Progress::~Progress() {
  stop();
}

void Progress::expect(int64_t rows) {
  if (!shows_ || thread_.joinable()) return;
  expected_ = rows;
  start_ = monotonic_seconds();
  thread_ = std::thread([this] { watch(); });
}

void Progress::rows_done(int64_t rows) {
  std::lock_guard lock(mutex_);
  done_ = rows;
  detail_.clear();
  clear();
}

void Progress::clear() {
  if (!drawn_ || !redraws_) return;
  write_diagnostic("\r\033[K", 0);
  drawn_ = false;
}

void Progress::detail(std::string text) {
  std::lock_guard lock(mutex_);
  detail_ = std::move(text);
}

void Progress::stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

std::string Progress::text() const {
  const std::string doing = detail_.empty() ? current_step() : detail_;
  return progress_text(done_, expected_, monotonic_seconds() - start_, doing);
}

void Progress::watch() {
  std::unique_lock lock(mutex_);
  double next = redraws_ ? first_line_seconds : line_seconds;
  while (!changed_.wait_for(lock, std::chrono::duration<double>(next), [&] { return over_; })) {
    write_diagnostic(fmt::format("{}{}: {}{}", redraws_ ? "\r" : "# ", program_, text(),
                                 redraws_ ? "\033[K" : "\n"),
                     0);
    drawn_ = true;
    next = redraws_ ? redraw_seconds : line_seconds;
  }
  clear();
}

}  // namespace gyre
