#pragma once
// Passes over rows whose lists do not reach the threshold (filtered_scores.hpp): sums of
// probabilities by digits of the values' keys, and counts of columns.
//
// A key is an integer in the order of the values: 16 bits for bf16, 32 for f32; -0 and +0 share a
// key. Probabilities are summed as integers, in units of 2^-fraction_bits of the largest, so the
// sums do not depend on how a row is split or in which order parts are added.

#include <cstdint>

#include "core/matrix_ref.hpp"

namespace gyre {

uint32_t key_of(float value, DType type);
/// Inverse of key_of, for keys of values other than NaN.
float value_of_key(uint32_t key, DType type);

inline constexpr int digit_bits = 8;
inline constexpr int64_t digit_buckets = int64_t{1} << digit_bits;
/// Sums per round: one per bucket, then the columns above the range of keys, then those below.
inline constexpr int64_t digit_sums = digit_buckets + 2;

struct MassScan {
  float max = 0;    ///< of the whole row, over all shards; finite
  float scale = 1;  ///< 1 / temperature
  int fraction_bits = 0;
  uint32_t low = 0;  ///< bucket of a key: (key - low) >> shift
  int shift = 0;
  bool all = false;  ///< whether the sums above and below the range are needed
};

/// Largest fraction_bits for which a sum of `columns` masses of at most 1 does not overflow.
int fraction_bits_for(int64_t columns);

/// masses [digit_sums] += floor(exp((z - max) · scale) · 2^fraction_bits) of the first `columns`
/// elements of the row.
void add_masses(ConstMatrixRef logits, int64_t row, int64_t columns, const MassScan& scan,
                int64_t* masses);

struct ColumnCounts {
  int64_t above = 0, equal = 0;
};

/// Counts the columns in [begin, end) of the row that are above `value`, and equal to it.
ColumnCounts count_columns(ConstMatrixRef logits, int64_t row, int64_t begin, int64_t end,
                           float value);

/// Column of the n-th last of the first `columns` elements that equal `value`; n >= 1, and there
/// must be at least n.
int64_t nth_last_equal(ConstMatrixRef logits, int64_t row, int64_t columns, float value, int64_t n);

}  // namespace gyre
