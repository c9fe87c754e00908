#pragma once
// JSON parsing and printing. Only json.cpp instantiates nlohmann-json, which takes seconds to
// compile.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace gyre {

using Json = nlohmann::ordered_json;

/// Parses a document. `source` names it in errors, `wanted` describes the expected content. Throws
/// a usage error, with the position, if the text is not JSON or has more than 32 nested lists and
/// objects, because printing recurses.
Json parse_json(const std::string& source, std::string_view text, std::string_view wanted);

/// Prints on one line, or with every level indented by `indent`. Invalid UTF-8, such as in file
/// names, becomes U+FFFD.
std::string dump_json(const Json& json, int indent = -1);

/// Value of an integer that fits in 64 bits; empty otherwise.
std::optional<int64_t> whole_number(const Json& json);

/// Text for messages: at most 40 characters, ASCII.
std::string shown_json(const Json& json);

}  // namespace gyre
