#include "report/progress.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string_view>

#include "report/value.hpp"
#include "runtime/clock.hpp"
#include "runtime/process.hpp"
#include "runtime/watchdog.hpp"
#include "supervision/launcher.hpp"
#include "supervision/terminal.hpp"

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

std::string shortened_to(int columns, std::string text) {
  constexpr std::string_view end = "...";
  const size_t most = std::max<int>(columns - 1, end.size());
  if (text.size() <= most) return text;
  return text.replace(most - end.size(), std::string::npos, end);
}

Progress::Progress(std::string program, const std::string& mode, bool shows)
    : program_(std::move(program)),
      columns_(mode == "off" ? 0 : std::max(stderr_columns(), mode == "on" ? 80 : 0)),
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
  if (!drawn_ || columns_ == 0) return;
  write_diagnostic("\r\033[K", 0);
  wait_for_launcher_to_read();  // so that it does not show what is printed next before this
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
  const bool redraws = columns_ > 0;
  double next = redraws ? first_line_seconds : line_seconds;
  while (!changed_.wait_for(lock, std::chrono::duration<double>(next), [&] { return over_; })) {
    const std::string line = fmt::format("{}: {}", program_, text());
    write_diagnostic(redraws ? "\r" + shortened_to(columns_, line) + "\033[K" : "# " + line + "\n",
                     0);
    drawn_ = true;
    next = redraws ? redraw_seconds : line_seconds;
  }
  clear();
}

}  // namespace gyre
