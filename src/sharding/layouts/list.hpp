#pragma once
// List of the layouts, one line each, in table order.
//
// To add a layout, write a file in this folder that defines `LayoutKind NAME_layout()`, and add
// X(NAME) here. See layouts.hpp for what an entry needs. The slots of a rank ascend, because
// schedules take its rows to be in the order of the stream.

#include "sharding/layouts.hpp"

#define GYRE_LAYOUTS(X)   \
  X(contiguous)           \
  X(contiguous_documents) \
  X(zigzag)               \
  X(dual_chunk_swap)      \
  X(striped)              \
  X(balanced)             \
  X(balanced_joint)       \
  X(hybrid)               \
  /* the end */

/// The default of apps and options.
#define GYRE_DEFAULT_LAYOUT dual_chunk_swap_layout
/// The default where recurrent layers have a layout of their own.
#define GYRE_RECURRENT_LAYOUT contiguous_layout

namespace gyre {

#define GYRE_DECLARE_LAYOUT(name) LayoutKind name##_layout();
GYRE_LAYOUTS(GYRE_DECLARE_LAYOUT)
#undef GYRE_DECLARE_LAYOUT

}  // namespace gyre
