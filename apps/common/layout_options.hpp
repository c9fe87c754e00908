#pragma once
// The layouts as options of an app: --layout, --stripe, --chunk.

#include <string>

#include "apps/common/registry_options.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// At first the default layout.
struct LayoutChoice : RegistryChoice<LayoutOptions> {
  LayoutChoice() { name = default_layout().name; }
  /// Its options for `cp` ranks.
  LayoutOptions for_ranks(int cp) const;
};

/// For declaring and checking a LayoutChoice.
RegistryOptions<LayoutKind, LayoutOptions> layout_choices();

/// A line for each layout.
std::string layout_help();

/// What layouts want of the slots of segments: "a multiple of 2 cp under dual-chunk-swap".
std::string segment_rule_help();

}  // namespace gyre
