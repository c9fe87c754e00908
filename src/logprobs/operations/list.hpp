#pragma once
// List of the operations on rows, one line each, in the order of printed tables.
//
// To add an operation, write a file in this folder that defines `RowOperation NAME_operation()`,
// and add X(NAME) here. See operation.hpp for what an entry needs.

#include "logprobs/operations/operation.hpp"

#define GYRE_ROW_OPERATIONS(X) \
  X(logprob)                   \
  X(entropy)                   \
  X(logprob_entropy)           \
  X(gather)                    \
  X(label_smoothing)           \
  X(z_loss)                    \
  X(focal)                     \
  X(raw_gather)                \
  X(distill)                   \
  X(distill_renormalised)      \
  X(teacher_topk_kl)           \
  /* the end */

namespace gyre {

#define GYRE_DECLARE_OPERATION(name) RowOperation name##_operation();
GYRE_ROW_OPERATIONS(GYRE_DECLARE_OPERATION)
#undef GYRE_DECLARE_OPERATION

}  // namespace gyre
