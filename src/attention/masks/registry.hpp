#pragma once
// The masks that have a name. list.hpp says how to add one.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention/masks/named_mask.hpp"

namespace gyre {

/// In the order of list.hpp.
const std::vector<NamedMask>& named_masks();

/// "causal[,window=N][,keep=N]; full; prefix-lm,prefix=N; ...": for help and errors.
std::string mask_choices();

/// A mask as it was asked for: "prefix-lm,prefix=1K".
struct MaskChoice {
  const NamedMask* mask;
  std::vector<int64_t> values;  ///< of its keys

  /// For documents of these lengths.
  MaskRule of(std::span<const int64_t> lengths) const { return mask->make(lengths, values); }
};

/// Reads a name and its numbers, in which K and M are 2^10 and 2^20. Usage errors, which begin with
/// "--mask": a name that there is not, with the nearest; a key that the mask does not have, or that
/// it needs; a number below its minimum.
MaskChoice parse_mask(std::string_view text);

}  // namespace gyre
