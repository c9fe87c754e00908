#pragma once
// TOML through toml++, whose tables of tables are as deep as a key has dots, and are destroyed by
// recursion: such keys are refused before it sees them.

#include <string>
#include <string_view>

namespace gyre {

/// The line, from 1 on, of a key of more than 32 dotted parts; 0: there is none.
int line_of_deep_key(std::string_view toml);

/// The document as JSON. Throws a usage error that begins with `path` and the line.
std::string toml_as_json(const std::string& path, const std::string& toml);

}  // namespace gyre
