// The chunks of balanced, assigned by compute and communication; see balanced.hpp.

#include "sharding/balanced.hpp"
#include "sharding/layouts/list.hpp"

namespace gyre {
namespace {

constexpr const char* layout_name = "balanced-joint";

}  // namespace

Layout balanced_joint(const SegmentBounds& bounds, const LayoutOptions& options) {
  return layout_of_assignment(layout_name, bounds, options.cp, balance_joint(bounds, options));
}

LayoutKind balanced_joint_layout() {
  return {.name = layout_name,
          .summary = "equal chunks, dealt for the shortest step: compute or receiving",
          .make = balanced_joint,
          .owned = no_owned_slots,
          .needed_share = no_needed_share,
          .reads = {&LayoutOptions::chunk, &LayoutOptions::pairs_per_key}};
}

}  // namespace gyre
