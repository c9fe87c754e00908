#pragma once
// Offsets of ragged arrays: item i is [offsets[i], offsets[i + 1]).

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace gyre {

/// Ragged documents: document i is tokens[offsets[i], offsets[i+1]).
struct DocumentView {
  std::span<const int32_t> tokens;
  std::span<const int64_t> offsets;
  int64_t size() const { return std::ssize(offsets) - 1; }
  int64_t length(int64_t i) const { return offsets[i + 1] - offsets[i]; }
  std::span<const int32_t> document(int64_t i) const {
    return tokens.subspan(offsets[i], length(i));
  }
};

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
