#include "report/value.hpp"

#include <fmt/format.h>

#include <cmath>

namespace gyre {

std::string to_text(const Value& value) {
  if (const double* number = std::get_if<double>(&value); number && std::isnan(*number))
    return "n/a";
  return std::visit([](const auto& v) { return fmt::format("{}", v); }, value);
}

std::string to_text(const Fields& fields) {
  std::string text;
  for (const auto& [name, value] : fields) {
    std::string shown = to_text(value);
    if (shown.empty() || shown.find_first_of(" \t\n") != std::string::npos)
      shown = '"' + shown + '"';
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, shown);
  }
  return text;
}

}  // namespace gyre
