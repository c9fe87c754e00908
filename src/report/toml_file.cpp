#include "report/toml_file.hpp"

#include <toml++/toml.h>

#include <sstream>

#include "core/error.hpp"

namespace gyre {
namespace {

constexpr int most_parts = 32;

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
      if (++dots >= most_parts) return line;
    } else if (std::string_view("=,{}[]#\n").find(c) != std::string_view::npos) {
      dots = 0;
    }
  }
  return 0;
}

std::string toml_as_json(const std::string& path, const std::string& toml) {
  if (const int line = line_of_deep_key(toml); line > 0)
    throw_usage("{}: line {}: a key of more than {} parts", path, line, most_parts);
  try {
    std::ostringstream json;
    json << toml::json_formatter(toml::parse(toml));
    return json.str();
  } catch (const toml::parse_error& error) {
    throw_usage("{}: line {}: {}", path, error.source().begin.line, error.description());
  }
}

}  // namespace gyre
