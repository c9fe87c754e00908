#pragma once
// Guards HDF5 reads, which can crash or loop forever in a damaged file.

#include <csignal>
#include <string>

#include "runtime/watchdog.hpp"

namespace gyre::h5 {

/// Scope in which the main thread reads a file by HDF5. The watchdog can end the read. If a file
/// that passed the trial (try_reading) makes HDF5 crash, the file's name is printed and
/// the program ends with exit code 3, since its memory can no longer be trusted. Outside of these
/// scopes signals keep their previous handlers. Scopes nest.
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
