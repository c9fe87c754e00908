#pragma once
// Reads TOML with toml++, which nests tables as deep as a key has dots and destroys them
// recursively. Keys of too many parts are therefore refused before parsing.

#include <string>
#include <string_view>

namespace gyre {

/// The line, from 1 on, of a key with more than 32 dotted parts; 0 if there is none.
int line_of_deep_key(std::string_view toml);

/// The document as JSON. Throws a usage error that begins with `path` and the line.
std::string toml_as_json(const std::string& path, const std::string& toml);

}  // namespace gyre
