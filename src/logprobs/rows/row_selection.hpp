#pragma once
// Selection of the largest logits of a shard's rows, in one pass.
//
//     bar = -inf; kept = {}
//     for each block of the row                    partials first, read from memory
//       for each run of it                         read from L2
//         append the elements above bar to kept    few, once bar has risen
//         if kept is long: bar = a value with M elements or a few more above it;
//                          drop elements not above bar
//     keep the M largest, in order
//
// Bisection over the bits of the values finds the bar. Each step counts the elements of `kept`
// above a value, vector by vector; unlike partial sorting, it has no unpredictable branches. If too
// many elements are equal for any such value, the first of them are kept.
//
// Equal values are ordered by ascending id, so the result does not depend on the blocks. In random
// data, about M / i elements of run i are above the bar. Memory therefore bounds the time: 2 or 4
// bytes are read per element; with partials, an element also costs one exponential.

#include <cstdint>
#include <span>

#include "core/matrix_ref.hpp"
#include "logprobs/rows/row_statistics.hpp"

namespace gyre {

struct RowTop {
  std::span<float> values;  ///< [rows, length] descending; -inf if the row has fewer
  std::span<int32_t> ids;   ///< [rows, length] columns of the shard, -1 if the row has fewer; or
                            ///< empty: not requested
  std::span<int32_t> last;  ///< [rows] occurrences of the list's last value in the row, in the list
                            ///< and beyond (0 for NaN); or empty: not requested
  int64_t length = 0;       ///< M, at least 1
};

/// Throws an internal error if shapes and lengths do not match.
void check_row_top(ConstMatrixRef logits, const RowScan& scan, const RowTop& top,
                   std::span<const SoftmaxPartial> partials);

/// Selects the `length` largest of the first scan.columns elements of each row and, unless
/// `partials` is empty, computes the partials [rows] of softmax_partials in the same pass (summed
/// in other blocks, so their last bits may differ). NaN ranks as the largest. Vectorised with
/// run-time dispatch. The bits do not depend on scan.threads.
void row_top(ConstMatrixRef logits, const RowScan& scan, const RowTop& top,
             std::span<SoftmaxPartial> partials);

}  // namespace gyre
