#include "core/error.hpp"

#include <fmt/format.h>

#include <algorithm>

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
  constexpr size_t most = 30;
  if (messages_.empty()) return;
  std::string text = headline;
  const size_t shown = std::min(messages_.size(), most);
  for (size_t i = 0; i < shown; ++i) text += "\n  - " + messages_[i];
  if (shown < messages_.size()) text += fmt::format("\n  - and {} more", messages_.size() - shown);
  throw Error(ExitCode::usage, text);
}

}  // namespace gyre
