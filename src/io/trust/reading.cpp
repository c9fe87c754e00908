#include "io/trust/reading.hpp"

#include <hdf5.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "core/error.hpp"
#include "runtime/process.hpp"
#include "supervision/supervisor.hpp"

namespace gyre::h5 {
namespace {

constexpr const char* version = &H5_VERS_INFO[std::string_view(H5_VERS_INFO).rfind(' ') + 1];
const char* volatile file_read = nullptr;
alignas(16) char handler_stack[1 << 16];  // HDF5 may have exhausted the normal stack

/// Calls only async-signal-safe functions. If the process has a supervisor, the signal then ends
/// the process, and the supervisor and the other ranks turn that into exit code 3.
void on_crash(int signal) {
  const char digits[] = {static_cast<char>('0' + signal / 10), static_cast<char>('0' + signal % 10),
                         '\0'};
  write_diagnostic(program_invocation_short_name);
  write_diagnostic(": error: reading '");
  write_diagnostic(file_read);
  write_diagnostic("' crashes HDF5 ");
  write_diagnostic(version);
  write_diagnostic(" (signal ");
  write_diagnostic(signal < 10 ? digits + 1 : digits);
  write_diagnostic(signal == SIGABRT
                       ? "): the file is damaged, or another rank has died\n"  // UCX aborts as well
                       : "): the file is damaged\n");
  if (!has_supervisor()) _exit(static_cast<int>(ExitCode::runtime));
  std::signal(signal, SIG_DFL);
  raise(signal);
}

}  // namespace

Reading::Reading(std::string_view what, const std::string& file)
    : wait_(what), outer_file_(file_read) {
  file_read = file.c_str();
  if (outer_file_ != nullptr) return;
  stack_t stack{};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof(handler_stack);
  sigaltstack(&stack, nullptr);
  struct sigaction action {};
  action.sa_handler = on_crash;
  action.sa_flags = SA_ONSTACK;
  for (size_t i = 0; i < std::size(signals); ++i)
    sigaction(signals[i], &action, &outer_actions_[i]);
}

Reading::~Reading() {
  file_read = outer_file_;
  if (outer_file_ != nullptr) return;
  for (size_t i = 0; i < std::size(signals); ++i)
    sigaction(signals[i], &outer_actions_[i], nullptr);
}

}  // namespace gyre::h5
