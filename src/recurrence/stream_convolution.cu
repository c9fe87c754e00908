#include <cmath>
#include <vector>

#include "core/index.hpp"
#include "recurrence/stream_convolution.hpp"
#include "runtime/for_rows.cuh"
#include "runtime/row_copy.hpp"

namespace gyre {
namespace {

/// Tokens whose products one element of the loop adds.
constexpr int64_t tokens_of_sum = 16 * recurrence_chunk;

template <class T>
struct Rows {
  T* data;
  int64_t rows, stride;
  explicit Rows(MatrixView<T> m) : data(m.data), rows(m.rows), stride(m.stride) {}
  GYRE_HOST_DEVICE T& operator()(int64_t row, int64_t column) const {
    return data[row * stride + column];
  }
};

/// Weights of one array, and what they are multiplied with.
struct Taps {
  const float* data;  ///< [width, channels], from the first channel of the array on
  int64_t width, channels;
  GYRE_HOST_DEVICE float operator()(int64_t j, int64_t column) const {
    return data[j * channels + column];
  }
};

/// Rows of a part and those before them: 0 before the document.
template <class T>
struct Window {
  Rows<const T> x, history;
  GYRE_HOST_DEVICE float operator()(int64_t t, int64_t column) const {
    if (t >= 0) return to_float(x(t, column));
    const int64_t row = t + history.rows;
    return row < 0 ? 0 : to_float(history(row, column));
  }
};

template <class T>
struct WeightedSum {
  Window<T> x;
  Taps taps;
  GYRE_HOST_DEVICE float operator()(int64_t t, int64_t column) const {
    float sum = 0;
    for (int64_t j = 0; j < taps.width; ++j)
      sum += taps(j, column) * x(t - taps.width + 1 + j, column);
    return sum;
  }
};

/// SiLU and its derivative; with e = exp(-|z|) nothing overflows.
struct Silu {
  float value, slope;
  GYRE_HOST_DEVICE explicit Silu(float z) {
    const float e = std::exp(-std::fabs(z)), share = 1 / (1 + e);
    const float sigmoid = z < 0 ? share * e : share, rest = z < 0 ? share : share * e;
    value = z * sigmoid;
    slope = sigmoid + value * rest;
  }
};

/// A row of a loop is head `i % heads` of token `i / heads`.
struct Heads {
  int64_t heads, dim;
  bool normalised;
  GYRE_HOST_DEVICE float factor(double squares) const {
    return normalised ? static_cast<float>(1 / std::sqrt(squares + convolution_epsilon)) : 1;
  }
};

template <class T>
struct Convolve {
  Heads heads;
  WeightedSum<T> z;
  Rows<float> y;
  template <class Lanes>
  GYRE_HOST_DEVICE void operator()(int64_t i, const Lanes& lanes) const {
    const int64_t t = i / heads.heads, first = i % heads.heads * heads.dim;
    double squares = 0;
    for (int64_t c = first + lanes.first; c < first + heads.dim; c += lanes.count) {
      const float value = Silu(z(t, c)).value;
      y(t, c) = value;
      squares += value * static_cast<double>(value);
    }
    const float factor = heads.factor(lanes.sum(squares));
    for (int64_t c = first + lanes.first; c < first + heads.dim; c += lanes.count)
      y(t, c) *= factor;
  }
};

template <class T>
struct Slopes {
  Heads heads;
  WeightedSum<T> z;
  Rows<float> d;  ///< gradient of y; then of z
  template <class Lanes>
  GYRE_HOST_DEVICE void operator()(int64_t i, const Lanes& lanes) const {
    const int64_t t = i / heads.heads, first = i % heads.heads * heads.dim;
    double squares = 0, products = 0;
    for (int64_t c = first + lanes.first; c < first + heads.dim; c += lanes.count) {
      const double value = Silu(z(t, c)).value;
      squares += value * value;
      products += value * d(t, c);
    }
    const float factor = heads.factor(lanes.sum(squares));
    const auto along = static_cast<float>(factor * lanes.sum(products));
    for (int64_t c = first + lanes.first; c < first + heads.dim; c += lanes.count) {
      const Silu silu(z(t, c));
      const float d_y = d(t, c);
      const float d_value = heads.normalised ? factor * (d_y - along * (factor * silu.value)) : d_y;
      d(t, c) = d_value * silu.slope;
    }
  }
};

/// Sums of a block of tokens: of 64 in f32, of these in double.
template <class T>
struct SumWeights {
  Window<T> x;
  Rows<const float> d_z;
  int64_t width, columns;
  double* sums;  ///< [blocks, width, columns]
  GYRE_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t column = i % columns, j = i / columns % width, block = i / columns / width;
    const int64_t end = smaller((block + 1) * tokens_of_sum, d_z.rows);
    double sum = 0;
    for (int64_t t = block * tokens_of_sum; t < end;) {
      float of_chunk = 0;
      for (const int64_t chunk = smaller(t + recurrence_chunk, end); t < chunk; ++t)
        of_chunk += d_z(t, column) * x(t - width + 1 + j, column);
      sum += of_chunk;
    }
    sums[i] = sum;
  }
  GYRE_HOST_DEVICE static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
};

struct AddSums {
  const double* sums;
  int64_t blocks, width, columns, channels;
  double* d_taps;  ///< from the first channel of the array on
  GYRE_HOST_DEVICE void operator()(int64_t i) const {
    double sum = 0;
    for (int64_t block = 0; block < blocks; ++block) sum += sums[block * width * columns + i];
    d_taps[i / columns * channels + i % columns] += sum;
  }
};

/// Gradients of rows of x, from row `first` of the part on, which is negative for a history.
template <class To>
struct InputGradient {
  Rows<const float> d_z;
  Taps taps;
  int64_t first, columns;
  Rows<const float> added;  ///< to the last rows of the part
  Rows<To> to;
  GYRE_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t row = i / columns, column = i % columns, t = first + row;
    float sum = 0;
    for (int64_t m = t < 0 ? -t : 0; m < taps.width && t + m < d_z.rows; ++m)
      sum += taps(taps.width - 1 - m, column) * d_z(t + m, column);
    const int64_t first_added = d_z.rows - added.rows;
    if (t >= first_added && t >= 0) sum += added(t - first_added, column);
    to(row, column) = converted<To>(sum);
  }
};

struct TurnWeights {
  const double* d_taps;
  int64_t width, channels;
  float* to;
  GYRE_HOST_DEVICE void operator()(int64_t i) const {
    to[i] = static_cast<float>(d_taps[i % width * channels + i / width]);
  }
};

template <class T>
Window<T> window(const ConvolutionPart& part, size_t array) {
  const ConstMatrixRef x = part.x[array], history = part.history[array];
  return {Rows<const T>(x.as<T>()),
          Rows<const T>(history.rows > 0 ? history.as<T>() : MatrixView<const T>())};
}

/// Calls f with a value of the C++ type of elements of `type`, f32 or bf16.
template <class F>
void with_type(DType type, F f) {
  if (type == DType::bf16)
    f(bf16{});
  else
    f(float{});
}

}  // namespace

StreamConvolutionKernel::StreamConvolutionKernel(const RecurrenceShape& shape, Stream& stream)
    : shape_(shape),
      stream_(stream),
      taps_(shape.convolution * shape.channels(), stream.space()),
      d_taps_(taps_.size(), stream.space()) {}

void StreamConvolutionKernel::set_weights(std::span<const float> weights) {
  const int64_t channels = shape_.channels(), width = shape_.convolution;
  std::vector<float> taps(weights.size());
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < width; ++j) taps[j * channels + c] = weights[c * width + j];
  stream_.copy(taps_.data(), taps.data(), taps.size() * sizeof(float));
  stream_.synchronize();
}

void StreamConvolutionKernel::clear_weight_gradients() {
  stream_.fill(d_taps_.data(), std::byte{0}, d_taps_.span().size_bytes());
}

void StreamConvolutionKernel::weight_gradients(int64_t first, std::span<float> to) {
  for_elements(
      stream_, std::ssize(to),
      TurnWeights{d_taps_.data() + first, shape_.convolution, shape_.channels(), to.data()});
}

void StreamConvolutionKernel::forward(const ConvolutionPart& part) {
  for (size_t a = 0; a < convolved_arrays.size(); ++a)
    with_type(part.x[a].type, [&](auto type) {
      using T = decltype(type);
      const Heads heads{heads_of(shape_, convolved_arrays[a]), dim_of(shape_, convolved_arrays[a]),
                        is_normalised(a)};
      const Taps taps{taps_.data() + first_channel(shape_, a), shape_.convolution,
                      shape_.channels()};
      for_rows(stream_, part.x[a].rows * heads.heads,
               Convolve<T>{heads, {window<T>(part, a), taps}, Rows(part.y[a].as<float>())});
    });
}

void StreamConvolutionKernel::slopes(const ConvolutionPart& part) {
  for (size_t a = 0; a < convolved_arrays.size(); ++a) {
    const int64_t columns = part.x[a].cols, history = part.history[a].rows;
    const Taps taps{taps_.data() + first_channel(shape_, a), shape_.convolution, shape_.channels()};
    const MatrixView<float> d_y = part.d_y[a].as<float>();
    with_type(part.x[a].type, [&](auto type) {
      using T = decltype(type);
      const Heads heads{heads_of(shape_, convolved_arrays[a]), dim_of(shape_, convolved_arrays[a]),
                        is_normalised(a)};
      for_rows(stream_, part.x[a].rows * heads.heads,
               Slopes<T>{heads, {window<T>(part, a), taps}, Rows(d_y)});
    });
    add_weight_gradients(part, a);
    if (history > 0)
      for_elements(
          stream_, history * columns,
          InputGradient<float>{Rows<const float>(d_y), taps, -history, columns,
                               Rows<const float>({}), Rows(part.d_history[a].as<float>())});
  }
}

void StreamConvolutionKernel::add_weight_gradients(const ConvolutionPart& part, size_t array) {
  const int64_t width = shape_.convolution, columns = part.x[array].cols;
  const int64_t blocks = ceil_div(part.x[array].rows, tokens_of_sum);
  if (sums_.size() < blocks * width * columns)
    sums_ = Buffer<double>(blocks * width * columns, stream_.space());
  with_type(part.x[array].type, [&](auto type) {
    using T = decltype(type);
    for_elements(
        stream_, blocks * width * columns,
        SumWeights<T>{window<T>(part, array), Rows<const float>(part.d_y[array].as<float>()), width,
                      columns, sums_.data()});
  });
  for_elements(stream_, width * columns,
               AddSums{sums_.data(), blocks, width, columns, shape_.channels(),
                       d_taps_.data() + first_channel(shape_, array)});
}

void StreamConvolutionKernel::backward(const ConvolutionPart& part) {
  for (size_t a = 0; a < convolved_arrays.size(); ++a) {
    const Taps taps{taps_.data() + first_channel(shape_, a), shape_.convolution, shape_.channels()};
    const MatrixRef &d_x = part.d_x[a], &added = part.added[a];
    with_type(d_x.type, [&](auto type) {
      using To = decltype(type);
      for_elements(stream_, d_x.rows * d_x.cols,
                   InputGradient<To>{
                       Rows<const float>(part.d_y[a].as<float>()), taps, 0, d_x.cols,
                       Rows<const float>(added.rows > 0 ? added.as<float>() : MatrixView<float>()),
                       Rows(d_x.as<To>())});
    });
  }
}

}  // namespace gyre
