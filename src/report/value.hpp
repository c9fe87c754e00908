#pragma once
// Values that are reported: in a table cell, a "key=value" or JSON.

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace gyre {

using Value = std::variant<bool, int64_t, double, std::string>;

/// Named values in the order in which they are printed.
using Fields = std::vector<std::pair<std::string, Value>>;

/// "true", "42", "text"; doubles with the fewest digits that read back to the same number, NaN as
/// "n/a".
std::string to_text(const Value& value);

/// "tokens=1024 schedule=ring"; text with blanks in it is quoted.
std::string to_text(const Fields& fields);

}  // namespace gyre
