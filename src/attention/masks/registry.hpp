#pragma once
// Registry of the named masks; list.hpp explains how to add one.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention/masks/named_mask.hpp"

namespace gyre {

/// Entries in the order of list.hpp.
const std::vector<NamedMask>& named_masks();

/// "causal[,window=N][,keep=N]; full; prefix-lm,prefix=N; ...": for help and errors.
std::string mask_choices();

/// A parsed mask, e.g. "prefix-lm,prefix=1K".
struct MaskChoice {
  const NamedMask* mask;
  std::vector<int64_t> values;  ///< [mask->keys]

  /// The lengths of the documents that the mask is of: these, or their sum if it joins them.
  std::vector<int64_t> documents_of(std::span<const int64_t> lengths) const;
  /// The mask for documents of these lengths, joined or not.
  MaskRule of(std::span<const int64_t> lengths) const { return mask->make(lengths, values); }
};

/// Parses a name and its numbers; K and M are 2^10 and 2^20. Throws a usage error, which begins
/// with "--mask", for an unknown name, with the nearest one, for an unknown or a missing key, and
/// for a number that is not whole or is below its minimum.
MaskChoice parse_mask(std::string_view text);

}  // namespace gyre
