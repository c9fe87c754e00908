#pragma once
// The name that was probably meant.

#include <string>
#include <string_view>
#include <vector>

namespace gyre {

/// Number of single-character insertions, deletions, replacements and swaps of neighbours that turn
/// `a` into `b` (optimal string alignment).
int edit_distance(std::string_view a, std::string_view b);

/// The candidate with the smallest edit distance to `text` (the first one of a tie), or "" when
/// every distance is more than half the longer text: then a suggestion would only confuse.
std::string nearest(std::string_view text, const std::vector<std::string>& candidates);

}  // namespace gyre
