#pragma once
// Errors and exit codes. A failing run ends with one of these codes on every rank.

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace gyre {

/// Exit codes of every mini-app.
enum class ExitCode : int {
  ok = 0,
  verification_failed = 1,
  /// unusable arguments, an impossible configuration or an input that breaks its schema
  usage = 2,
  runtime = 3,  ///< MPI, HDF5, CUDA, NCCL or the file system failed, or a peer died
  timeout = 4,
  skipped = 77,
};

/// All exit codes, from the least to the most severe.
inline constexpr ExitCode exit_codes[] = {
    ExitCode::skipped, ExitCode::ok,      ExitCode::verification_failed,
    ExitCode::usage,   ExitCode::runtime, ExitCode::timeout};
inline bool is_exit_code(int64_t code) {
  return std::ranges::any_of(exit_codes,
                             [=](ExitCode known) { return static_cast<int64_t>(known) == code; });
}

/// An error that ends the run. Only the rank that throws is known to have found it; the other ranks
/// continue and later wait for that rank. The rank must end them at once without unwinding its
/// stack, because destructors wait for all ranks (files that are closed collectively,
/// communicators). Code that runs on many ranks therefore catches an Error only around work without
/// communication (run_agreed of comm/agree.hpp), and an AgreedError elsewhere. An uncaught Error
/// calls std::terminate where it is thrown, with the stack intact.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : Error(code, message, false) {}

  ExitCode code() const { return code_; }
  bool agreed() const { return agreed_; }

 protected:
  Error(ExitCode code, const std::string& message, bool agreed)
      : std::runtime_error(message), code_(code), agreed_(agreed) {}

 private:
  ExitCode code_;
  bool agreed_;
};

/// An error that every rank of the run throws at the same place: all ranks unwind and shut down in
/// order.
class AgreedError : public Error {
 public:
  AgreedError(ExitCode code, const std::string& message) : Error(code, message, true) {}
};

namespace detail {
// Formatting is out of line, so that each call instantiates only an argument list.
[[noreturn]] void throw_formatted(ExitCode code, fmt::string_view format, fmt::format_args args);
[[noreturn]] void fail_check(const char* expression, const char* file, int line,
                             fmt::string_view format, fmt::format_args args);
std::string formatted(fmt::string_view format, fmt::format_args args);
}  // namespace detail

/// Throws an error that the user can fix: a bad option, a bad input or an impossible configuration
/// (exit code 2).
template <class... Args>
[[noreturn]] void throw_usage(fmt::format_string<Args...> format, Args&&... args) {
  detail::throw_formatted(ExitCode::usage, format, fmt::make_format_args(args...));
}

/// Throws the error of a failed library or system call (exit code 3).
template <class... Args>
[[noreturn]] void throw_runtime(fmt::format_string<Args...> format, Args&&... args) {
  detail::throw_formatted(ExitCode::runtime, format, fmt::make_format_args(args...));
}

/// Collects all errors of a configuration, so that a user sees them at once.
class ConfigErrors {
 public:
  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    messages_.push_back(detail::formatted(format, fmt::make_format_args(args...)));
  }
  bool empty() const { return messages_.empty(); }
  const std::vector<std::string>& messages() const { return messages_; }
  /// Throws a usage error that lists all errors, one per line; does nothing when there are none.
  void throw_if_any(const std::string& headline) const;

 private:
  std::vector<std::string> messages_;
};

/// Throws the runtime error of a failed GYRE_CHECK.
template <class... Args>
[[noreturn]] void fail_check(const char* expression, const char* file, int line,
                             fmt::format_string<Args...> format, Args&&... args) {
  detail::fail_check(expression, file, line, format, fmt::make_format_args(args...));
}

}  // namespace gyre

/// Checks an invariant of the program itself (not of its input). Always compiled in; the message
/// takes fmt arguments.
#define GYRE_CHECK(condition, ...)                                                     \
  do {                                                                                 \
    if (!(condition)) ::gyre::fail_check(#condition, __FILE__, __LINE__, __VA_ARGS__); \
  } while (false)
