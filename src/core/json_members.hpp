#pragma once
// JSON documents with an object that is too large to keep.

#include <functional>
#include <string>
#include <string_view>

#include "core/json.hpp"

namespace gyre {

/// Takes the members of the object at `place` ("model/vocab") one by one. The document gets none of
/// them: inserting into a large object takes a time that grows with the square of its size.
struct JsonMembers {
  std::string place;
  std::function<void(const std::string& key, const Json& value)> take;
};

/// Parses as parse_json() of core/json.hpp does; `members` takes what is at its place.
Json parse_json(const std::string& source, std::string_view text, std::string_view wanted,
                const JsonMembers& members);

}  // namespace gyre
