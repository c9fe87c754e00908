#include "runtime/row_copy.hpp"

#include <algorithm>

namespace gyre {
namespace {

/// Calls f with a value of the C++ type of elements of `type`, f32 or bf16.
template <class F>
void with_type(DType type, F f) {
  GYRE_CHECK(type == DType::f32 || type == DType::bf16, "rows of {} copied", name_of(type));
  if (type == DType::f32)
    f(float{});
  else
    f(bf16{});
}

template <class Via, class From, class To>
void copy_line(const From* from, To* to, int64_t count, bool add) {
  constexpr bool same =
      std::is_same_v<From, To> && (std::is_same_v<To, bf16> || std::is_same_v<Via, To>);
  if (add) {
    for (int64_t i = 0; i < count; ++i)
      to[i] = converted<To>(to_float(to[i]) + to_float(converted<Via>(from[i])));
  } else if constexpr (same) {
    std::copy_n(from, count, to);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = converted<To>(converted<Via>(from[i]));
  }
}

template <class Via, class From, class To>
void copy_on_host(const RowCopy& c, const From* from, To* to) {
  for (int64_t r = 0; r < c.rows; ++r)
    for (int64_t p = 0; p < c.planes; ++p)
      copy_line<Via>(from + r * c.from.row + p * c.from.plane, to + r * c.to.row + p * c.to.plane,
                     c.width, c.add);
}

}  // namespace

void copy_rows(std::span<const RowCopy> copies, Stream& stream) {
  if (stream.space() == MemorySpace::device) return cuda_copy_rows(copies, stream);
  for (const RowCopy& c : copies)
    with_type(c.via, [&](auto via) {
      with_type(c.from.type, [&](auto from) {
        with_type(c.to.type, [&](auto to) {
          copy_on_host<decltype(via)>(c, reinterpret_cast<const decltype(from)*>(c.from.data),
                                      reinterpret_cast<decltype(to)*>(c.to.data));
        });
      });
    });
}

void copy_matrix(ConstMatrixRef from, MatrixRef to, Stream& stream, bool add) {
  GYRE_CHECK(from.rows == to.rows && from.cols == to.cols, "[{}, {}] and [{}, {}]", from.rows,
             from.cols, to.rows, to.cols);
  RowCopy copy{.rows = to.rows, .width = to.cols, .from = {}, .to = {}, .add = add};
  copy.from = {const_cast<std::byte*>(from.data), from.type, from.stride};
  copy.to = {to.data, to.type, to.stride};
  copy_rows(std::span(&copy, 1), stream);
}

}  // namespace gyre
