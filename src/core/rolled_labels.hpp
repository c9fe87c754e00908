#pragma once
// Detects labels that were shifted by the wrong boundaries.
//
//     cu_seqlens 0 3 6, cu_seqlens_padded 0 4 8
//
//     slots                      a  b  c  .  d  e  f  .
//     labels                     b  c  -  -  e  f  -  -
//     rolled in [0, 3), [3, 6)   b  c  -  d  e  -
//
// A roll by the real boundaries of a padded stream drifts by the padding of all earlier documents.
// In padding before another document, it leaves that document's first token as the label.

#include <cstdint>
#include <span>

namespace gyre {

/// Returns the first padding slot before another document whose label is the token in the next
/// slot; -1 if there is none. `padding` [slots]: 1 is padding. Padding at the beginning of a row of
/// `width` slots belongs to the document after it.
template <class Id>
int64_t find_rolled_label(std::span<const Id> ids, std::span<const Id> labels,
                          std::span<const uint8_t> padding, int64_t width) {
  bool in_front = true;  // no token of this row so far
  for (size_t t = 0; t + 1 < ids.size(); ++t) {
    const auto at = static_cast<int64_t>(t) % width;
    in_front = padding[t] != 0 && (at == 0 || in_front);
    const bool is_own = in_front && at + 1 < width;
    if (padding[t] != 0 && padding[t + 1] == 0 && !is_own && labels[t] == ids[t + 1])
      return static_cast<int64_t>(t);
  }
  return -1;
}

/// End of the error message, after the position of the slot.
inline constexpr const char* rolled_label_text =
    "is padding, and its label is the first token of the next document: were labels rolled by "
    "cu_seqlens instead of cu_seqlens_padded? Padding has the label -100";

}  // namespace gyre
