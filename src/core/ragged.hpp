#pragma once
// Offsets of ragged arrays: item i is [offsets[i], offsets[i + 1]).

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace gyre {

/// Offsets [documents + 1] of the next-token predictions of documents with these token offsets. A
/// document of n tokens has max(0, n - 1) predictions; the first one predicts its second token.
inline std::vector<int64_t> prediction_offsets(std::span<const int64_t> token_offsets) {
  std::vector<int64_t> offsets{0};
  for (size_t i = 1; i < token_offsets.size(); ++i)
    offsets.push_back(offsets.back() +
                      std::max<int64_t>(0, token_offsets[i] - token_offsets[i - 1] - 1));
  return offsets;
}

}  // namespace gyre
