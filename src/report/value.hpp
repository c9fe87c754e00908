#pragma once
// Values of reports and their texts in table cells, in "key=value" and in JSON.

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace gyre {

using Value = std::variant<bool, int64_t, double, std::string>;

/// Named values in the order in which they are printed.
using Fields = std::vector<std::pair<std::string, Value>>;

/// "true", "42", "text". A double has the fewest digits that read back to the same number; NaN is
/// "n/a".
std::string to_text(const Value& value);

/// "tokens=1024 schedule=ring"; text that contains blanks is quoted.
std::string to_text(const Fields& fields);

/// Returns one text "name=value" for each field.
std::vector<std::string> texts_of(const Fields& fields);

/// Lines of less than 120 columns that begin with `first`, then with `next`, and have the pieces
/// with `between` behind all but the last. A line ends behind a piece, or at a blank of one that is
/// longer than a line.
std::string wrapped(const std::string& first, const std::string& next,
                    std::vector<std::string> pieces, const std::string& between);

/// Three digits and an SI prefix: si_text(16.8e6, "B") is "16.8 MB", si_text(0.0021, "s") "2.1 ms",
/// si_text(512, "") "512".
std::string si_text(double value, const std::string& unit);

/// "1 rank", "4 ranks".
std::string count_text(int64_t count, const std::string& noun);

/// Runs of ascending numbers: {0, 1, 2, 3, 8} is {"0-3", "8"}.
std::vector<std::string> ranges_text(const std::vector<int>& numbers);

}  // namespace gyre
