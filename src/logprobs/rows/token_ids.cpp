#include "logprobs/rows/token_ids.hpp"

#include <hwy/cache_control.h>

#include <utility>

#include "core/error.hpp"
#include "logprobs/rows/row_output.hpp"
#include "logprobs/rows/token_columns.hpp"

namespace gyre {

void check_token_ids(const RowTokenIds& token_ids, int64_t rows) {
  constexpr int64_t most = 1 << 16;  // the index of an id must fit in a bf16 output
  GYRE_CHECK(0 <= token_ids.per_row && token_ids.per_row <= most &&
                 std::cmp_equal(token_ids.ids.size(), rows * token_ids.per_row) &&
                 token_ids.ids.size() == token_ids.weights.size(),
             "{} rows of {} token ids: {} ids, {} weights", rows, token_ids.per_row,
             token_ids.ids.size(), token_ids.weights.size());
}

void scatter_token_weights(const RowTokenIds& token_ids, int64_t columns, MatrixRef d_logits,
                           int threads) {
  check_token_ids(token_ids, d_logits.rows);
  GYRE_CHECK(0 <= columns && columns <= d_logits.cols, "{} of {} columns", columns, d_logits.cols);
  const RowOutput out = output_at(d_logits, {});
  for_each_row_part(threads, d_logits.rows, d_logits.cols, [&](int64_t begin, int64_t end) {
    TokenColumns picked(token_ids, columns);
    for (int64_t r = begin; r < end; ++r) {
      clear(out, r, 0, d_logits.cols);
      if (!picked.start(r)) continue;
      picked.keep_weights();
      picked.put(d_logits);
    }
  });
}

void gather_token_logits(ConstMatrixRef logits, std::span<const int32_t> ids, int64_t per_row,
                         int64_t first_column, int64_t columns, std::span<float> values) {
  GYRE_CHECK(0 <= columns && columns <= logits.cols && ids.size() == values.size() &&
                 std::cmp_equal(ids.size(), logits.rows * per_row),
             "{} of {} columns, {} ids and {} values of {} rows of {}", columns, logits.cols,
             ids.size(), values.size(), logits.rows, per_row);
  // Each id is a cache miss, so prefetch ahead.
  constexpr int64_t ahead = 16;
  const auto owned = [&](int64_t i) {
    const int64_t column = ids[i] - first_column;
    return ids[i] >= 0 && column >= 0 && column < columns ? column : -1;
  };
  const int64_t element = size_of(logits.type);
  for (int64_t i = 0; i < std::ssize(ids); ++i) {
    if (i + ahead < std::ssize(ids)) {
      const int64_t column = owned(i + ahead), row = (i + ahead) / per_row;
      if (column >= 0) hwy::Prefetch(logits.data + (row * logits.stride + column) * element);
    }
    if (const int64_t column = owned(i); column >= 0) values[i] = logits.at(i / per_row, column);
  }
}

}  // namespace gyre
