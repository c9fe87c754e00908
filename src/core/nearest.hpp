#pragma once
// Nearest name, for suggestions in error messages.

#include <string>
#include <string_view>
#include <vector>

namespace gyre {

/// Number of single-character insertions, deletions, replacements and swaps of neighbours that turn
/// `a` into `b` (optimal string alignment).
int edit_distance(std::string_view a, std::string_view b);

/// Returns the candidate with the smallest edit distance to `text` (the first of a tie), or "" if
/// every distance exceeds half the length of the longer text. Dashes before both are not counted.
std::string nearest(std::string_view text, const std::vector<std::string>& candidates);

}  // namespace gyre
