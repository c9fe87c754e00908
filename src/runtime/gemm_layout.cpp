#include "runtime/gemm_layout.hpp"

#include <algorithm>
#include <string>

namespace gyre {
namespace {

std::string text_of(const char* name, const ConstMatrixRef& x, Transpose op) {
  return fmt::format("{}{} [{}, {}] {}", name, op == Transpose::yes ? "ᵀ, a matrix" : "", x.rows,
                     x.cols, name_of(x.type));
}

ColumnMajorGemm::Matrix transpose_in_place(const ConstMatrixRef& x, Transpose op) {
  // The stride matters only between rows; libraries refuse one below the row length.
  const int64_t leading = std::max<int64_t>(x.rows <= 1 ? x.cols : x.stride, 1);
  return {x.data, x.type, x.cols, x.rows, leading, op};
}

}  // namespace

GemmShape gemm_shape(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op,
                     ConstMatrixRef c) {
  const bool at = a_op == Transpose::yes, bt = b_op == Transpose::yes;
  const int64_t m = at ? a.cols : a.rows, n = bt ? b.rows : b.cols;
  const int64_t k = at ? a.rows : a.cols, b_depth = bt ? b.cols : b.rows;
  const auto refuse = [&](const std::string& why) {
    throw_usage("no matrix product {} = {} times {}: {}", text_of("c", c, Transpose::no),
                text_of("a", a, a_op), text_of("b", b, b_op), why);
  };
  if (k != b_depth) refuse(fmt::format("sums run over {} of a and {} of b", k, b_depth));
  if (c.rows != m || c.cols != n) refuse(fmt::format("c has to be [{}, {}]", m, n));
  if (a.type != b.type || (a.type != DType::f32 && a.type != DType::bf16))
    refuse("a and b have to be f32 or bf16 both");
  if (c.type != DType::f32 && c.type != a.type)
    refuse(fmt::format("c has to be f32{}", a.type == DType::f32 ? "" : " or bf16"));
  const auto check_stride = [&](const char* name, const ConstMatrixRef& x) {
    if (x.rows > 1 && x.stride < x.cols)
      refuse(
          fmt::format("rows of {} overlap: a stride of {} for {} columns", name, x.stride, x.cols));
  };
  check_stride("a", a);
  check_stride("b", b);
  check_stride("c", c);
  return {m, n, k};
}

ColumnMajorGemm column_major(ConstMatrixRef a, Transpose a_op, ConstMatrixRef b, Transpose b_op,
                             ConstMatrixRef c) {
  const GemmShape shape = gemm_shape(a, a_op, b, b_op, c);
  return {shape.n,
          shape.m,
          shape.k,
          transpose_in_place(b, b_op),
          transpose_in_place(a, a_op),
          transpose_in_place(c, Transpose::no)};
}

int alignment_of(const void* address) {
  const auto value = reinterpret_cast<uintptr_t>(address);
  int alignment = 256;
  while (alignment > 1 && value % static_cast<unsigned>(alignment) != 0) alignment /= 2;
  return alignment;
}

}  // namespace gyre
