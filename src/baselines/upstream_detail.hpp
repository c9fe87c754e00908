#pragma once
// Definitions shared by the files that implement upstream.hpp.

#include <algorithm>

#include "baselines/upstream.hpp"
#include "baselines/upstream_passes.hpp"
#include "core/error.hpp"

namespace gyre::upstream {

// Slots of temporaries. The framework frees a tensor after its last use, and the next tensor gets
// its memory. Slots are reused in the same way.
inline constexpr size_t cast = 0;      // logits in f32
inline constexpr size_t shifted = 1;   // logits - max; then the softmax
inline constexpr size_t logprobs = 2;  // exp(logits - max); then the log-softmax; then a gradient
inline constexpr size_t product = 3;   // further tensors of a slice
inline constexpr size_t whole = 4;     // the f32 gradient of all slices

/// The context of one call.
struct Call {
  const Shape& shape;
  Communicator& tp;
  Stream& stream;
  Scratch& scratch;

  int threads() const { return shape.threads; }
  int64_t valid() const { return shape.vocab.valid(tp.rank()); }
  void all_reduce(std::span<float> values, ReduceOp op, std::string_view what) const {
    tp.all_reduce(values.data(), std::ssize(values), DType::f32, op, stream, what)->wait();
  }
};

struct Rows {
  int64_t begin = 0, count = 0;
};

/// Calls work(rows) for each slice of the rows, in order; once for all rows if chunk is 0.
template <class Work>
void for_each_slice(const Shape& shape, Work work) {
  const int64_t chunk = shape.chunk > 0 ? shape.chunk : shape.tokens;
  for (int64_t begin = 0; begin < shape.tokens; begin += chunk)
    work(Rows{begin, std::min(chunk, shape.tokens - begin)});
}

template <class Byte>
BasicMatrixRef<Byte> rows_of(BasicMatrixRef<Byte> x, Rows rows) {
  const auto row_bytes = x.stride * size_of(x.type);
  return {x.data + rows.begin * row_bytes, x.type, rows.count, x.cols, x.stride};
}

template <class T>
std::span<T> rows_of(std::span<T> x, Rows rows, int64_t of_row = 1) {
  return x.subspan(rows.begin * of_row, rows.count * of_row);
}

inline void check(const Shape& shape, const Communicator& tp, ConstMatrixRef logits) {
  const int64_t columns = shape.vocab.columns(tp.rank());
  GYRE_CHECK(shape.vocab.ranks() == tp.size(), "a vocabulary of {} shards on {} ranks",
             shape.vocab.ranks(), tp.size());
  GYRE_CHECK(logits.rows == shape.tokens && logits.cols == columns,
             "logits [{}, {}]; they should be [{}, {}]", logits.rows, logits.cols, shape.tokens,
             columns);
}

inline MatrixView<float> rows_of(MatrixView<float> x, Rows rows) {
  return x.rows_from(rows.begin, rows.count);
}

/// The matrix if it is f32, otherwise an f32 copy in the slot `cast`.
inline MatrixView<const float> in_f32(ConstMatrixRef x, Scratch& scratch, int threads) {
  if (x.type == DType::f32) return x.as<float>();
  const MatrixView<float> wide = scratch.tensor(cast, x.rows, x.cols);
  widen(x.as<bf16>(), wide, threads);
  return wide;
}

}  // namespace gyre::upstream
