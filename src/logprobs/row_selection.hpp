#pragma once
// The largest logits of a shard's rows, in one pass.
//
//     bar = -inf; kept = {}
//     for each block of the row                    its moments are taken first, from memory
//       for each run of it                         from L2
//         append the elements above bar to kept    few, once bar has risen
//         if kept is long: bar = some value with M elements or a few more above it;
//                          drop what is not above bar
//     keep the M largest, in order
//
// Bisection over the bits of the values finds the bar. Each step counts the elements of kept above
// a value, vector by vector: unlike partial sorting, this has no branches to mispredict. If so many
// elements are equal that no value has between M and a few more above it, the first of them stay.
//
// Equal values are ordered by ascending id, so that the result is one list, whatever the blocks.
// In random data about M / i elements of run i are above the bar. So the limit is memory: 2 or 4
// bytes are read for each element; with moments it is also one exponential for each element.

#include <cstdint>
#include <span>

#include "core/matrix_ref.hpp"
#include "logprobs/row_statistics.hpp"

namespace gyre {

struct RowTop {
  std::span<float> values;  ///< [rows, length] descending; -inf where the row has fewer
  std::span<int32_t> ids;   ///< [rows, length] columns of the shard, or empty: not wanted; -1
                            ///< where the row has fewer
  std::span<int32_t> last;  ///< [rows] how often the last value of the list occurs in the row (in
                            ///< the list and beyond it; 0 if it is NaN), or empty: not wanted
  int64_t length = 0;       ///< M, at least 1
};

/// Throws an internal error unless shapes and lengths fit each other.
void check_row_top(ConstMatrixRef logits, const RowScan& scan, const RowTop& top,
                   std::span<const RowMoments> moments);

/// The `length` largest of the first scan.columns elements of each row and, unless `moments` is
/// empty, the moments [rows] of row_moments, in the same pass (summed in other blocks, so that
/// their last bits may differ). A NaN ranks as the largest. Vectorised; run-time dispatch. Bits do
/// not depend on scan.threads.
void row_top(ConstMatrixRef logits, const RowScan& scan, const RowTop& top,
             std::span<RowMoments> moments);

}  // namespace gyre
