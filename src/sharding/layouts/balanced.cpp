// Equal chunks, equally many per rank, assigned by visible pairs; see balanced.hpp.

#include "sharding/balanced.hpp"

#include "sharding/layouts/list.hpp"

namespace gyre {
namespace {

constexpr const char* layout_name = "balanced";

}  // namespace

Layout balanced(const SegmentBounds& bounds, const LayoutOptions& options) {
  return layout_of_assignment(layout_name, bounds, options.cp, balance_compute(bounds, options));
}

LayoutKind balanced_layout() {
  return {.name = layout_name,
          .summary = "equal chunks, equal counts, dealt for equal compute",
          .make = balanced,
          .owned = no_owned_slots,
          .needed_share = no_needed_share,
          .reads = {&LayoutOptions::chunk}};
}

}  // namespace gyre
