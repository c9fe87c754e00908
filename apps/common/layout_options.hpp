#pragma once
// The layouts as options of an app: --layout, --stripe, --chunk.

#include <string>

#include "apps/common/registry_options.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// A chosen layout; initially the default.
struct LayoutChoice : RegistryChoice<LayoutOptions> {
  LayoutChoice() { name = default_layout().name; }
  /// The layout's options for `cp` ranks.
  LayoutOptions for_ranks(int cp) const;
};

/// Declares and checks a LayoutChoice.
RegistryOptions<LayoutKind, LayoutOptions> layout_choices();

/// A line for each layout.
std::string layout_help();

/// Requirements of layouts on segment slots: "a multiple of 2 cp under dual-chunk-swap".
std::string segment_rule_help();

}  // namespace gyre
