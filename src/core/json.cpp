#include "core/json.hpp"

#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

#include "core/error.hpp"
#include "core/json_members.hpp"

namespace gyre {
namespace {

constexpr int max_levels = 32;

/// Text of the error without the exception's name in front.
std::string_view reason_of(const Json::exception& error) {
  const std::string_view what = error.what();
  const size_t name_end = what.find("] ");
  return name_end == std::string_view::npos ? what : what.substr(name_end + 2);
}

/// The parser's place in a document: the keys of the objects that are open.
class OpenLevels {
 public:
  void open(bool is_object) { levels_.push_back({is_object, "", {}}); }
  void close() { levels_.pop_back(); }
  /// Returns whether the innermost object had no such key.
  bool add(const std::string& key) {
    levels_.back().last = key;
    return levels_.back().keys.insert(key).second;
  }
  /// Whether the innermost level is the object at `place`.
  bool is_at(std::string_view place) const {
    if (place.empty() || levels_.empty() || !levels_.back().is_object) return false;
    std::string here;
    for (size_t i = 0; i + 1 < levels_.size(); ++i) here += (i > 0 ? "/" : "") + levels_[i].last;
    return here == place;
  }
  const std::string& key() const { return levels_.back().last; }

 private:
  struct Level {
    bool is_object;
    std::string last;
    std::unordered_set<std::string> keys;
  };
  std::vector<Level> levels_;
};

}  // namespace

Json parse_json(const std::string& source, std::string_view text, std::string_view wanted,
                const JsonMembers& members) {
  using Event = Json::parse_event_t;
  OpenLevels levels;
  const auto keep = [&](int depth, Event event, Json& value) {
    if (depth > max_levels)
      throw_usage("{}: more than {} levels of brackets; wanted: {}", source, max_levels, wanted);
    if (event == Event::object_start || event == Event::array_start)
      levels.open(event == Event::object_start);
    if (event == Event::object_end || event == Event::array_end) levels.close();
    if (event == Event::key && !levels.add(value.get<std::string>()))
      throw_usage("{}: the key '{}' is there twice; wanted: {}", source, levels.key(), wanted);
    if (event == Event::value && levels.is_at(members.place)) members.take(levels.key(), value);
    return event != Event::key || !levels.is_at(members.place);
  };
  try {
    return Json::parse(text, keep);
  } catch (const Json::exception& error) {
    throw_usage("{}: {}; wanted: {}", source, reason_of(error), wanted);
  }
}

Json parse_json(const std::string& source, std::string_view text, std::string_view wanted) {
  return parse_json(source, text, wanted, {});
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
