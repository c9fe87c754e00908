#include "core/nearest.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace gyre {

int edit_distance(std::string_view a, std::string_view b) {
  // Three rows of the table d[i][j] = distance of the first i characters of a and the first j of b.
  std::vector<int> before(b.size() + 1), previous(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    std::swap(before, previous);
    std::swap(previous, row);
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int replaced = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({replaced, previous[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

std::string nearest(std::string_view text, const std::vector<std::string>& candidates) {
  std::string best;
  int best_distance = std::numeric_limits<int>::max();
  for (const std::string& candidate : candidates) {
    const int distance = edit_distance(text, candidate);
    const size_t dashes = std::min(text.find_first_not_of('-'), candidate.find_first_not_of('-'));
    const size_t longer = std::max(text.size(), candidate.size()) - dashes;
    if (distance >= best_distance || 2 * static_cast<size_t>(distance) > longer) continue;
    best = candidate;
    best_distance = distance;
  }
  return best;
}

}  // namespace gyre
