#include "model/decoder_ops.hpp"

#include <algorithm>
#include <tuple>
#include <vector>

#include "model/cuda_decoder_ops.hpp"
#include "model/elementwise.hpp"
#include "runtime/buffer.hpp"
#include "runtime/gemm.hpp"
#include "runtime/row_copy.hpp"

namespace gyre {
namespace {

/// Rows of a matrix in f32: the matrix itself if it is f32, otherwise a copy.
class WideRows {
 public:
  /// Makes room for copies of `rows` rows of `matrix`.
  WideRows(ConstMatrixRef matrix, int64_t rows)
      : copy_(matrix.type == DType::f32 ? 0 : rows * matrix.cols) {}

  template <class Byte>
  auto begin(const BasicMatrixRef<Byte>& part) -> decltype(part.template as<float>()) {
    if (part.type == DType::f32) return part.template as<float>();
    const MatrixView<float> wide = copy_.matrix(part.rows, part.cols);
    copy_converted(part, wide);
    return wide;
  }
  void end(MatrixRef part) {
    if (part.type != DType::f32) copy_converted(copy_.matrix(part.rows, part.cols), part);
  }
  void end(ConstMatrixRef /*part*/) {}

 private:
  Buffer<float> copy_;
};

template <class Matrix>
using Wide = WideRows;

/// Calls f(first row, f32 views...) on blocks of at most `block` rows, or once if all are f32.
/// Matrices have equally many rows. What f writes to a view of a MatrixRef is rounded to its type.
template <class F, class... Matrices>
void in_f32(int64_t block, F f, const Matrices&... matrices) {
  const int64_t rows = std::get<0>(std::tie(matrices...)).rows;
  if (((matrices.type == DType::f32) && ...)) return f(0, matrices.template as<float>()...);
  const auto apply = [&](auto&... wide) {
    for (int64_t r = 0; r < rows; r += block) {
      const int64_t count = std::min(block, rows - r);
      f(r, wide.begin(matrices.rows_from(r, count))...);
      (wide.end(matrices.rows_from(r, count)), ...);
    }
  };
  std::tuple<Wide<Matrices>...> wide{WideRows(matrices, std::min(block, rows))...};
  std::apply(apply, wide);
}

constexpr int64_t few_rows = 16;     // of passes bound by bandwidth: the copies stay in cache
constexpr int64_t many_rows = 1024;  // of a product: w is packed once for each block

class HostDecoderOps final : public DecoderOps {
 public:
  using DecoderOps::DecoderOps;
  void set_slots(std::span<const int32_t> tokens, std::span<const int32_t> positions) override {
    tokens_ = tokens;
    positions_ = positions;
  }
  void embed(ConstMatrixRef table, int64_t first, MatrixRef out) override {
    const std::vector<float> zeros(static_cast<size_t>(out.cols), 0.0F);
    for (int64_t i = 0; i < out.rows; ++i) {
      const int64_t row = tokens_[i] - first;
      copy_converted(row >= 0 && row < table.rows
                         ? table.rows_from(row, 1)
                         : MatrixView<const float>(zeros.data(), 1, out.cols),
                     out.rows_from(i, 1));
    }
  }
  void add_rms_norm(MatrixRef x, ConstMatrixRef y, const float* weight, float eps,
                    MatrixRef h) override {
    if (!y.empty()) add(x, y);
    in_f32(
        few_rows,
        [&](int64_t, MatrixView<const float> from, MatrixView<float> to) {
          rms_norm(from, {weight, static_cast<size_t>(from.cols)}, eps, to);
        },
        ConstMatrixRef(x), h);
  }
  void linear(ConstMatrixRef x, ConstMatrixRef w, MatrixRef y) override {
    in_f32(
        many_rows,
        [&](int64_t, MatrixView<const float> from, MatrixView<float> to) { gemm(from, w, to); }, x,
        y);
  }
  void head_norm(MatrixRef x, int64_t head_dim, const float* weight, float eps) override {
    const std::span<const float> weights(weight, static_cast<size_t>(head_dim));
    in_f32(
        few_rows,
        [&](int64_t, MatrixView<float> to) {
          for (int64_t i = 0; i < to.rows; ++i) {
            const MatrixView<float> heads(to.row(i), to.cols / head_dim, head_dim);
            rms_norm(heads, weights, eps, heads);
          }
        },
        x);
  }
  void rope(MatrixRef q, MatrixRef k, int64_t head_dim, const Rotary& rotary) override {
    for (const MatrixRef& x : {q, k})
      in_f32(
          few_rows,
          [&](int64_t first, MatrixView<float> to) {
            apply_rope(to, head_dim, rotary, positions_.subspan(first, to.rows));
          },
          x);
  }
  void gate_multiply(MatrixRef gate, ConstMatrixRef up, GateActivation activation) override {
    in_f32(
        few_rows,
        [&](int64_t, MatrixView<float> to, MatrixView<const float> factor) {
          gyre::gate_multiply(activation, to, factor, to);
        },
        gate, up);
  }

 private:
  std::span<const int32_t> tokens_, positions_;
};

}  // namespace

void DecoderOps::add(MatrixRef x, ConstMatrixRef y) {
  copy_matrix(y, x, stream_, true);
}

void DecoderOps::convert(ConstMatrixRef from, MatrixRef to) {
  copy_matrix(from, to, stream_);
}

void DecoderOps::add_bias(MatrixRef x, const float* bias) {
  const MatrixView<const float> rows(bias, x.rows, x.cols, 0);  // the same one
  copy_matrix(rows, x, stream_, true);
}

std::unique_ptr<DecoderOps> make_decoder_ops(Stream& stream) {
  if (stream.space() == MemorySpace::device) return make_cuda_decoder_ops(stream);
  return std::make_unique<HostDecoderOps>(stream);
}

}  // namespace gyre
