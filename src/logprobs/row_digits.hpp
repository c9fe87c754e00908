#pragma once
// Passes over one row of a shard for the rows whose threshold no short list holds: probabilities
// added up by digits of the values' keys, and counts of columns.
//
// A key is an integer in the order of the values: 16 bits for bf16, 32 for f32; -0 has that of +0.
// Probabilities are added as integers, in units of 2^-fraction_bits of the largest one, so that the
// sums do not depend on how a row is cut or in which order parts are added.

#include <cstdint>

#include "core/matrix_ref.hpp"

namespace gyre {

uint32_t key_of(float value, DType type);
/// The inverse, for keys of numbers.
float value_of_key(uint32_t key, DType type);

inline constexpr int digit_bits = 8;
inline constexpr int64_t digit_buckets = int64_t{1} << digit_bits;
/// Sums of a round: by bucket, then of the columns above the range of keys, then of those below.
inline constexpr int64_t digit_sums = digit_buckets + 2;

struct MassScan {
  float max = 0;    ///< of the whole row, over all shards; finite
  float scale = 1;  ///< 1 / temperature
  int fraction_bits = 0;
  uint32_t low = 0;  ///< bucket of a key: (key - low) >> shift
  int shift = 0;
  bool all = false;  ///< whether columns above and below are wanted too
};

/// How many of `columns` values of at most 1 can be added up.
int fraction_bits_for(int64_t columns);

/// masses [digit_sums] += floor(exp((z - max) · scale) · 2^fraction_bits) of the first `columns`
/// elements of the row.
void add_masses(ConstMatrixRef logits, int64_t row, int64_t columns, const MassScan& scan,
                int64_t* masses);

struct ColumnCounts {
  int64_t above = 0, equal = 0;
};

/// Columns [begin, end) of the row that are above `value`, and equal to it.
ColumnCounts count_columns(ConstMatrixRef logits, int64_t row, int64_t begin, int64_t end,
                           float value);

/// The column of the n-th last of the first `columns` elements that equal `value`; n >= 1, and
/// there are as many.
int64_t nth_last_equal(ConstMatrixRef logits, int64_t row, int64_t columns, float value, int64_t n);

}  // namespace gyre
