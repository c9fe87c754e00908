#include "apps/logprobs/logit_matrix.hpp"

#include <algorithm>
#include <vector>

#include "core/error.hpp"
#include "core/special_values.hpp"

namespace gyre {
namespace {

void store_row(std::span<const float> from, MatrixRef to, int64_t row) {
  for (int64_t c = 0; c < to.cols; ++c) {
    const float z = from[c];
    if (to.type == DType::f32)
      to.as<float>()(row, c) = z;
    else
      to.as<bf16>()(row, c) = to_bf16(z);
  }
}

/// Rows [begin, begin + count) of a matrix.
MatrixRef rows_of(MatrixRef m, int64_t begin, int64_t count) {
  return {m.data + begin * m.stride * static_cast<int64_t>(size_of(m.type)), m.type, count, m.cols,
          m.stride};
}

}  // namespace

void fill_rows(MatrixRef matrix, Stream& stream,
               const std::function<void(int64_t row, std::span<float> to)>& make_row) {
  if (matrix.rows * matrix.cols == 0) return;
  const bool on_host = stream.space() == MemorySpace::host;
  std::vector<float> row(matrix.cols);
  constexpr int64_t max_bytes = int64_t{1} << 24;
  const int64_t row_bytes = matrix.cols * static_cast<int64_t>(size_of(matrix.type));
  const int64_t most =
      on_host ? matrix.rows : std::clamp<int64_t>(max_bytes / row_bytes, 1, matrix.rows);
  LogitMatrix copy(on_host ? 0 : most, matrix.cols, matrix.type);
  GYRE_CHECK(on_host || matrix.stride == matrix.cols, "rows of {} elements, {} apart", matrix.cols,
             matrix.stride);
  for (int64_t begin = 0; begin < matrix.rows; begin += most) {
    const MatrixRef there = rows_of(matrix, begin, std::min(most, matrix.rows - begin));
    const MatrixRef here = on_host ? there : rows_of(copy.ref(), 0, there.rows);
    for (int64_t r = 0; r < here.rows; ++r) {
      make_row(begin + r, row);
      store_row(row, here, r);
    }
    if (on_host) continue;
    stream.copy(there.data, here.data, there.rows * row_bytes);
    stream.synchronize();
  }
}

void fill_rows_of_tokens(std::span<const int64_t> tokens, MatrixRef to, Stream& stream,
                         const std::function<void(int64_t token, std::span<float> to)>& make_row) {
  GYRE_CHECK(std::ssize(tokens) == to.rows, "{} tokens for {} rows", tokens.size(), to.rows);
  fill_rows(to, stream, [&](int64_t r, std::span<float> row) {
    const int64_t token = tokens[r];
    if (token < 0)
      std::ranges::fill(row, nan_of<float>);
    else
      make_row(token, row);
  });
}

ConstMatrixRef HostRow::read(ConstMatrixRef matrix, int64_t row, Stream& stream) {
  const int64_t element = size_of(matrix.type);
  const std::byte* from = matrix.data + row * matrix.stride * element;
  if (stream.space() == MemorySpace::host) return {from, matrix.type, 1, matrix.cols, matrix.cols};
  const int64_t bytes = matrix.cols * element;
  if (copy_.size() < bytes) copy_ = Buffer<std::byte>(bytes);
  stream.copy(copy_.data(), from, bytes);
  stream.synchronize();
  return {copy_.data(), matrix.type, 1, matrix.cols, matrix.cols};
}

}  // namespace gyre
