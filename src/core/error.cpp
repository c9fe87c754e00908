#include "core/error.hpp"

#include <fmt/format.h>

namespace gyre {

namespace detail {

std::string formatted(fmt::string_view format, fmt::format_args args) {
  return fmt::vformat(format, args);
}

void throw_formatted(ExitCode code, fmt::string_view format, fmt::format_args args) {
  throw Error(code, formatted(format, args));
}

void fail_check(const char* expression, const char* file, int line, fmt::string_view format,
                fmt::format_args args) {
  throw Error(ExitCode::runtime, fmt::format("internal check '{}' failed at {}:{}: {}", expression,
                                             file, line, formatted(format, args)));
}

}  // namespace detail

void ConfigErrors::throw_if_any(const std::string& headline) const {
  if (messages_.empty()) return;
  std::string text = headline;
  for (const std::string& message : messages_) text += "\n  - " + message;
  throw Error(ExitCode::usage, text);
}

}  // namespace gyre
