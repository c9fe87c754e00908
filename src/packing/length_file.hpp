#pragma once
// Files of document lengths: a published histogram, or the lengths themselves.
//
//     # prolong64k: where it is from              121
//     below,share                                 4096
//     64,0.041225                                 77
//     96,0.05438
//
// A line that begins with # is a comment, and empty lines are skipped. The second line of this
// histogram says that 5.4 % of the documents have 64 to 95 tokens. The first interval begins at 1:
// documents without tokens are left out. Shares are relative to their sum.

#include <cstdint>
#include <string>
#include <vector>

namespace gyre {

struct LengthHistogram {
  std::vector<int64_t> below;  ///< [intervals] ascending; interval i ends before below[i]
  std::vector<double> up_to;   ///< [intervals] sum of the shares of the intervals 0 .. i
};

/// Both read lengths below `end`. They throw a usage error that names file and line for what is no
/// histogram (edges that do not ascend, negative shares, shares that are all 0) or no list.
LengthHistogram read_length_histogram(const std::string& path, int64_t end);
std::vector<int64_t> read_length_list(const std::string& path, int64_t end);

}  // namespace gyre
