#pragma once
// JSON, read and written. What nlohmann-json makes of either takes seconds to compile: it is made
// here, once.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace gyre {

using Json = nlohmann::ordered_json;

/// Parses a document. `source` is what errors call it, `wanted` what they ask for. A usage error
/// says where the text is no JSON, or that it has more than 32 levels of lists and objects: what
/// prints them recurses.
Json parse_json(const std::string& source, std::string_view text, std::string_view wanted);

/// In one line, or with every level indented by `indent`. Bytes that are no UTF-8, such as those of
/// file names, become U+FFFD.
std::string dump_json(const Json& json, int indent = -1);

/// An integer that fits 64 bits; nothing for any other value.
std::optional<int64_t> whole_number(const Json& json);

/// For messages: at most 40 characters of it, in ASCII.
std::string shown_json(const Json& json);

}  // namespace gyre
