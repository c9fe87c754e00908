#pragma once
// Reading a file by HDF5, which can crash or loop for ever in a damaged one.

#include <csignal>
#include <string>

#include "runtime/watchdog.hpp"

namespace gyre::h5 {

/// For its lifetime, the main thread reads a file by HDF5. The watchdog can end it. A crash, of a
/// file that passed the trial (io/trial_reading.hpp), prints the file's name before it ends the
/// program with exit code 3; nothing else of the process can be relied on then. Outside of these
/// scopes signals do what they did before. Scopes nest.
class Reading {
 public:
  /// `what` names the step: "opening a.h5". `file` must live as long as the scope.
  Reading(std::string_view what, const std::string& file);
  ~Reading();
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  static constexpr int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
  WaitScope wait_;
  const char* outer_file_;
  struct sigaction outer_actions_[std::size(signals)];
};

}  // namespace gyre::h5
