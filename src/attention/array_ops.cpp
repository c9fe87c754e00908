#include "attention/array_ops.hpp"

#include <algorithm>

namespace gyre {
namespace {

/// Calls f with a value of the C++ type of elements of `type`, f32 or bf16.
template <class F>
void with_type(DType type, F f) {
  GYRE_CHECK(type == DType::f32 || type == DType::bf16, "attention arrays of {}", name_of(type));
  if (type == DType::f32)
    f(float{});
  else
    f(bf16{});
}

template <class Via, class From, class To>
void copy_row(const From* from, To* to, int64_t count, bool add) {
  if (add) {
    for (int64_t i = 0; i < count; ++i)
      to[i] = converted<To>(to_float(to[i]) + to_float(converted<Via>(from[i])));
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = converted<To>(converted<Via>(from[i]));
  }
}

template <class Via, class From, class To>
void copy_rows(const RowCopy& c, const From* from, To* to) {
  for (int64_t r = 0; r < c.rows; ++r)
    for (int64_t p = 0; p < c.planes; ++p)
      copy_row<Via>(from + r * c.from.row + p * c.from.plane, to + r * c.to.row + p * c.to.plane,
                    c.width, c.add);
}

class HostArrayOps final : public ArrayOps {
 public:
  void copy(std::span<const RowCopy> copies) override {
    for (const RowCopy& c : copies)
      with_type(c.via, [&](auto via) {
        with_type(c.from.type, [&](auto from) {
          with_type(c.to.type, [&](auto to) {
            copy_rows<decltype(via)>(c, reinterpret_cast<const decltype(from)*>(c.from.data),
                                     reinterpret_cast<decltype(to)*>(c.to.data));
          });
        });
      });
  }

  void fill(MatrixView<float> to, float value) override {
    for (int64_t r = 0; r < to.rows; ++r) std::fill_n(to.row(r), to.cols, value);
  }

  void take_in_sinks(const MatrixRef& out, MatrixView<float> lse, const float* sinks) override {
    const int64_t dim = lse.cols == 0 ? 0 : out.cols / lse.cols;
    with_type(out.type, [&](auto t) {
      using T = decltype(t);
      const MatrixView<T> rows = out.as<T>();
      for (int64_t r = 0; r < lse.rows; ++r)
        for (int64_t h = 0; h < lse.cols; ++h) {
          if (lse(r, h) == -std::numeric_limits<float>::infinity()) continue;  // padding
          const SinkWeights with = take_in_sink(lse(r, h), sinks[h]);
          lse(r, h) = with.lse;
          T* row = rows.row(r) + h * dim;
          for (int64_t d = 0; d < dim; ++d) row[d] = converted<T>(to_float(row[d]) * with.keep);
        }
    });
  }

  void delta(const ConstMatrixRef& out, const ConstMatrixRef& d_out,
             MatrixView<float> delta) override {
    const int64_t dim = delta.cols == 0 ? 0 : out.cols / delta.cols;
    with_type(out.type, [&](auto a) {
      with_type(d_out.type, [&](auto b) {
        const auto o = out.as<decltype(a)>();
        const auto d = d_out.as<decltype(b)>();
        for (int64_t r = 0; r < delta.rows; ++r)
          for (int64_t h = 0; h < delta.cols; ++h) {
            double sum = 0;
            for (int64_t i = h * dim; i < (h + 1) * dim; ++i)
              sum += to_float(o(r, i)) * static_cast<double>(to_float(d(r, i)));
            delta(r, h) = static_cast<float>(sum);
          }
      });
    });
  }

  void sum_over_heads(MatrixView<float> heads, int64_t dim, int64_t part) override {
    for (int64_t r = 0; r < heads.rows; ++r)
      for (int64_t i = dim - part; i < dim; ++i) sum_elements(heads.row(r) + i, heads.cols, dim);
  }

  void add_sink_gradient(MatrixView<const float> lse, MatrixView<const float> delta,
                         const float* sinks, double* d_sinks) override {
    for (int64_t h = 0; h < lse.cols; ++h)
      for (int64_t r = 0; r < lse.rows; ++r)
        d_sinks[h] -= sink_gradient_term(sinks[h], lse(r, h), delta(r, h));
  }
};

/// Bytes from the first element of a matrix to the end of its last one.
size_t extent_of(const ConstMatrixRef& m) {
  if (m.rows == 0 || m.cols == 0) return 0;
  return ((m.rows - 1) * m.stride + m.cols) * size_of(m.type);
}

}  // namespace

std::unique_ptr<ArrayOps> make_host_array_ops() {
  return std::make_unique<HostArrayOps>();
}

std::unique_ptr<ArrayOps> make_array_ops(Stream& stream) {
  if (stream.space() == MemorySpace::device) return make_cuda_array_ops(stream);
  return make_host_array_ops();
}

HostCopy::HostCopy(const ConstMatrixRef& from, Stream& stream) : matrix_(from) {
  stream.synchronize();
  if (stream.space() == MemorySpace::host) return;
  const size_t bytes = extent_of(from);
  copy_ = Buffer<std::byte>(bytes);
  stream.copy(copy_.data(), from.data, bytes);
  stream.synchronize();
  matrix_.data = copy_.data();
}

HostFill::HostFill(const MatrixRef& to, Stream& stream) : to_(to), stream_(stream), matrix_(to) {
  GYRE_CHECK(to.cols == to.stride, "{} of {} columns are to be filled in", to.cols, to.stride);
  if (stream.space() == MemorySpace::host) return;
  staging_ = Buffer<std::byte>(extent_of(to));
  matrix_.data = staging_.data();
}

void HostFill::upload() {
  if (stream_.space() == MemorySpace::host) return;
  stream_.copy(to_.data, matrix_.data, extent_of(to_));
  stream_.synchronize();
}

}  // namespace gyre
