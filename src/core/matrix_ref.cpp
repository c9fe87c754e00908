#include "core/matrix_ref.hpp"

#include <algorithm>

namespace gyre {
namespace {

void convert_row(const float* from, float* to, int64_t count) {
  std::copy_n(from, count, to);
}
void convert_row(const bf16* from, bf16* to, int64_t count) {
  std::copy_n(from, count, to);
}
void convert_row(const bf16* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}
void convert_row(const float* from, bf16* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
}

template <class From, class To>
void convert(ConstMatrixRef from, MatrixRef to) {
  const MatrixView<const From> source = from.as<From>();
  const MatrixView<To> target = to.as<To>();
  for (int64_t r = 0; r < from.rows; ++r) convert_row(source.row(r), target.row(r), from.cols);
}

}  // namespace

void copy_converted(ConstMatrixRef from, MatrixRef to) {
  GYRE_CHECK(from.rows == to.rows && from.cols == to.cols, "[{}, {}] and [{}, {}]", from.rows,
             from.cols, to.rows, to.cols);
  if (from.type == DType::f32)
    (to.type == DType::f32 ? convert<float, float> : convert<float, bf16>)(from, to);
  else
    (to.type == DType::f32 ? convert<bf16, float> : convert<bf16, bf16>)(from, to);
}

}  // namespace gyre
