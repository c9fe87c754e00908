#include "core/json.hpp"

#include <nlohmann/json.hpp>
#include <utility>

#include "core/error.hpp"

namespace gyre {
namespace {

constexpr int max_levels = 32;

/// Text of the error without the exception's name in front.
std::string_view reason_of(const Json::exception& error) {
  const std::string_view what = error.what();
  const size_t name_end = what.find("] ");
  return name_end == std::string_view::npos ? what : what.substr(name_end + 2);
}

}  // namespace

Json parse_json(const std::string& source, std::string_view text, std::string_view wanted) {
  const auto is_shallow = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > max_levels)
      throw_usage("{}: more than {} levels of brackets; wanted: {}", source, max_levels, wanted);
    return true;
  };
  try {
    return Json::parse(text, is_shallow);
  } catch (const Json::exception& error) {
    throw_usage("{}: {}; wanted: {}", source, reason_of(error), wanted);
  }
}

std::string dump_json(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

std::optional<int64_t> whole_number(const Json& json) {
  if (!json.is_number_integer()) return {};
  if (json.is_number_unsigned() && !std::in_range<int64_t>(json.get<uint64_t>())) return {};
  return json.get<int64_t>();
}

std::string shown_json(const Json& json) {
  const std::string text = json.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() > 40 ? text.substr(0, 37) + "..." : text;
}

}  // namespace gyre
