#pragma once
// Progress of a long run, on stderr.

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace gyre {

/// Shows the progress of a run. On a terminal, also behind a launcher on this host, it redraws one
/// line, from 5 s on, and clears it before anything else is printed. Elsewhere it prints a line of
/// text every 10 s. It shows nothing before expect(), or in mode "off".
class Progress {
 public:
  /// `mode`: "auto", "on" (treat stderr as a terminal even if it is a pipe) or "off". `shows`:
  /// whether this rank shows the progress.
  Progress(std::string program, const std::string& mode, bool shows);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Starts the display; `rows` is the total.
  void expect(int64_t rows);
  /// Sets the number of finished rows, and clears the line so that a row may be printed.
  void rows_done(int64_t rows);
  /// Describes the work in more detail than the watchdog's step: "pass 3, bin 7 of 12".
  void detail(std::string text);
  /// Ends the display and clears its line.
  void stop();

 private:
  void watch();
  void clear();
  std::string text() const;

  const std::string program_;
  const int columns_;  // of the terminal; 0: there is none
  const bool shows_;
  std::thread thread_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false, drawn_ = false;
  int64_t expected_ = 0, done_ = 0;
  std::string detail_;
  double start_ = 0;
};

/// `text`, cut to fit one line of `columns` columns together with the cursor.
std::string shortened_to(int columns, std::string text);

/// "12 of 30 rows, 41 s, 3.4 s a row, about 62 s left: ring, dual-chunk-swap, 4096 tokens, fwd"
std::string progress_text(int64_t done, int64_t expected, double seconds, const std::string& doing);

}  // namespace gyre
