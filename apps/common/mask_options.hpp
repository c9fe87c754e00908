#pragma once
// The mask of an attention as options of an app: --mask and --window.

#include <cstdint>
#include <span>
#include <string>

#include "attention/mask.hpp"
#include "core/error.hpp"
#include "sharding/layouts.hpp"

namespace CLI {
class App;
}

namespace gyre {

struct MaskOptions {
  std::string mask = "causal";  ///< a name and its numbers; see attention/masks/registry.hpp
  int64_t window = 0;           ///< shorthand for the window of a causal mask
  bool operator==(const MaskOptions&) const = default;

  /// The mask of documents of these lengths.
  MaskRule of(std::span<const int64_t> lengths) const;
  /// The mask of documents that begin at these tokens; the last value is their end.
  MaskRule of_offsets(std::span<const int64_t> offsets) const;
};

/// Options for layouts that weigh the visible pairs of this mask. Mask and offsets must outlive it.
LayoutOptions weighed_by(LayoutOptions options, const MaskRule& mask,
                         std::span<const int64_t> offsets);

void declare_mask_options(CLI::App& app, MaskOptions& o);
void check_mask_options(const MaskOptions& o, ConfigErrors& errors);

}  // namespace gyre
