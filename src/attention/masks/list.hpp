#pragma once
// List of the named masks, one line each, in the order of --help. The first is the default.
//
// To add a mask, write a file in this folder that defines `NamedMask NAME_mask()`, and add X(NAME)
// here. See named_mask.hpp for what an entry needs.

#include "attention/masks/named_mask.hpp"

#define GYRE_MASKS(X) \
  X(causal)           \
  X(full)             \
  X(prefix_lm)        \
  X(block_causal)     \
  X(chunked)          \
  X(shared_prefix)    \
  X(share_question)   \
  X(causal_blockwise) \
  X(sliding_window)   \
  X(top_k)            \
  /* the end */

namespace gyre {

#define GYRE_DECLARE_MASK(name) NamedMask name##_mask();
GYRE_MASKS(GYRE_DECLARE_MASK)
#undef GYRE_DECLARE_MASK

}  // namespace gyre
