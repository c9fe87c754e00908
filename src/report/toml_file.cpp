#include "report/toml_file.hpp"

#include <toml++/toml.h>

#include <cmath>
#include <sstream>

#include "core/error.hpp"

namespace gyre {
namespace {

constexpr int max_parts = 32;

/// Throws a usage error for the first number that JSON cannot represent (an infinity or NaN).
void require_finite(const std::string& path, const toml::node& node) {
  if (const auto* table = node.as_table())
    for (const auto& [key, value] : *table) require_finite(path, value);
  if (const auto* array = node.as_array())
    for (const toml::node& value : *array) require_finite(path, value);
  if (const auto* number = node.as_floating_point(); number && !std::isfinite(number->get()))
    throw_usage("{}: line {}: {}; wanted: a finite number, or a text in quotation marks", path,
                node.source().begin.line, number->get());
}

}  // namespace

int line_of_deep_key(std::string_view toml) {
  int line = 1, dots = 0;
  char quote = 0;
  for (size_t i = 0; i < toml.size(); ++i) {
    const char c = toml[i];
    if (c == '\n') ++line;
    if (quote != 0) {
      if (c == '\\' && quote == '"') ++i;
      if (c == quote || c == '\n') quote = 0;
    } else if (c == '"' || c == '\'') {
      quote = c;
    } else if (c == '.') {
      if (++dots >= max_parts) return line;
    } else if (std::string_view("=,{}[]#\n").find(c) != std::string_view::npos) {
      dots = 0;
    }
  }
  return 0;
}

std::string toml_as_json(const std::string& path, const std::string& toml) {
  if (const int line = line_of_deep_key(toml); line > 0)
    throw_usage("{}: line {}: a key of more than {} parts", path, line, max_parts);
  try {
    std::ostringstream json;
    const toml::table table = toml::parse(toml);
    require_finite(path, table);
    json << toml::json_formatter(table);
    return json.str();
  } catch (const toml::parse_error& error) {
    throw_usage("{}: line {}: {}", path, error.source().begin.line, error.description());
  }
}

}  // namespace gyre
