#include "core/error.hpp"

namespace gyre {

void ConfigErrors::throw_if_any(const std::string& headline) const {
  if (messages_.empty()) return;
  std::string text = headline;
  for (const std::string& message : messages_) text += "\n  - " + message;
  throw Error(ExitCode::usage, text);
}

void fail_check(const char* expression, const char* file, int line, const std::string& message) {
  throw Error(ExitCode::runtime, fmt::format("internal check '{}' failed at {}:{}: {}", expression,
                                             file, line, message));
}

}  // namespace gyre
