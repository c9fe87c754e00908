#include "recurrence/convolution.hpp"

#include <algorithm>
#include <cmath>

#include "core/dot.hpp"
#include "recurrence/convolution_rows.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

MatrixRef head_rows(const MatrixRef& rows, int64_t column, int64_t dim, int64_t begin,
                    int64_t count) {
  return rows.rows_from(begin, count).columns_from(column, dim);
}

/// row <- y, of the values of SiLU. Returns 1 / sqrt(Σ s² + 1e-6).
float normalise(float* row, int64_t count) {
  const auto factor = static_cast<float>(1 / std::sqrt(dot(row, row, count) + convolution_epsilon));
  for (int64_t i = 0; i < count; ++i) row[i] *= factor;
  return factor;
}

}  // namespace

int64_t first_channel(const RecurrenceShape& shape, size_t index) {
  int64_t channel = 0;
  for (size_t i = 0; i < index; ++i) channel += width_of(shape, convolved_arrays[i]);
  return channel;
}

double convolution_flops(Pass pass, int64_t tokens, const RecurrenceShape& shape) {
  return (pass == Pass::forward ? 2.0 : 4.0) * shape.convolution * shape.channels() * tokens;
}

CpuConvolutionKernel::CpuConvolutionKernel(const RecurrenceShape& shape, int threads)
    : shape_(shape),
      width_(shape.convolution),
      threads_(threads),
      taps_(width_ * shape.channels()),
      d_taps_(taps_.size()) {
  const int64_t dim = std::max(shape.key_dim, shape.value_dim);
  for (int t = 0; t < threads; ++t)
    scratch_.push_back({std::vector<float>((width_ - 1 + std::max(recurrence_chunk, width_)) * dim),
                        std::vector<float>(dim), std::vector<float>(dim),
                        std::vector<float>(width_ * dim)});
}

void CpuConvolutionKernel::set_weights(std::span<const float> weights) {
  const int64_t channels = shape_.channels();
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t j = 0; j < width_; ++j) taps_[j * channels + c] = weights[c * width_ + j];
}

void CpuConvolutionKernel::clear_weight_gradients() {
  std::ranges::fill(d_taps_, 0.0);
}

void CpuConvolutionKernel::weight_gradients(int64_t first, std::span<float> to) {
  for (int64_t i = 0; i < std::ssize(to); ++i)
    to[i] = static_cast<float>(d_taps_[i % width_ * shape_.channels() + first + i / width_]);
}

template <class Body>
void CpuConvolutionKernel::for_each_head(Body body) {
  const int64_t keys = shape_.key_heads;
  for_each_task(threads_, 2 * keys + shape_.value_heads, [&](int64_t task, int thread) {
    const size_t array = task < keys ? 0 : task < 2 * keys ? 1 : 2;
    const int64_t dim = dim_of(shape_, convolved_arrays[array]);
    const int64_t column = (task - static_cast<int64_t>(array) * keys) * dim;
    body(Head{array, column, dim, first_channel(shape_, array) + column}, scratch_[thread]);
  });
}

template <class Body>
void CpuConvolutionKernel::for_each_chunk(const ConvolutionPart& part, const Head& head,
                                          Scratch& scratch, Body body) {
  const MatrixRef &x = part.x[head.array], &history = part.history[head.array];
  const int64_t before = width_ - 1, zeros = before - history.rows, dim = head.dim;
  float* const rows = scratch.rows.data();
  std::fill_n(rows, zeros * dim, 0.0F);
  copy_converted(head_rows(history, head.column, dim, 0, history.rows),
                 MatrixView<float>(rows + zeros * dim, history.rows, dim));
  for (int64_t begin = 0; begin < x.rows; begin += recurrence_chunk) {
    const int64_t tokens = std::min(recurrence_chunk, x.rows - begin);
    copy_converted(head_rows(x, head.column, dim, begin, tokens),
                   MatrixView<float>(rows + before * dim, tokens, dim));
    body(begin, tokens);
    std::copy_n(rows + tokens * dim, before * dim, rows);
  }
}

void CpuConvolutionKernel::forward(const ConvolutionPart& part) {
  for_each_head([&](const Head& head, Scratch& scratch) {
    const MatrixView<float> y = part.y[head.array].as<float>();
    for_each_chunk(part, head, scratch, [&](int64_t begin, int64_t tokens) {
      for (int64_t t = 0; t < tokens; ++t) {
        float* const row = y.row(begin + t) + head.column;
        weighted_sum({tap(0, head), shape_.channels()},
                     {scratch.rows.data() + t * head.dim, head.dim}, width_, head.dim, row);
        silu_row(row, head.dim, row, scratch.slope.data());
        if (is_normalised(head.array)) normalise(row, head.dim);
      }
    });
  });
}

void CpuConvolutionKernel::slopes(const ConvolutionPart& part) {
  for_each_head([&](const Head& head, Scratch& scratch) {
    const int64_t dim = head.dim;
    const MatrixView<float> d_y = part.d_y[head.array].as<float>();
    float *const value = scratch.value.data(), *const slope = scratch.slope.data();
    for_each_chunk(part, head, scratch, [&](int64_t begin, int64_t tokens) {
      std::ranges::fill(scratch.sums, 0.0F);
      for (int64_t t = 0; t < tokens; ++t) {
        const float* const x = scratch.rows.data() + t * dim;
        float* const d = d_y.row(begin + t) + head.column;
        weighted_sum({tap(0, head), shape_.channels()}, {x, dim}, width_, dim, value);
        silu_row(value, dim, value, slope);
        if (is_normalised(head.array)) {
          const float factor = normalise(value, dim);
          const auto along = static_cast<float>(dot(value, d, dim));
          for (int64_t c = 0; c < dim; ++c) d[c] = factor * (d[c] - along * value[c]);
        }
        for (int64_t c = 0; c < dim; ++c) d[c] *= slope[c];
        for (int64_t j = 0; j < width_; ++j)
          add_products(d, x + j * dim, dim, scratch.sums.data() + j * dim);
      }
      for (int64_t j = 0; j < width_; ++j)
        for (int64_t c = 0; c < dim; ++c)
          d_taps_[j * shape_.channels() + head.channel + c] += scratch.sums[j * dim + c];
    });
    history_gradients(part, head, scratch);
  });
}

void CpuConvolutionKernel::history_gradients(const ConvolutionPart& part, const Head& head,
                                             Scratch& scratch) {
  // Rows of dz of tokens before and behind the part's own are 0.
  const int64_t before = width_ - 1, dim = head.dim;
  const int64_t own = std::min(before, part.x[head.array].rows);
  const MatrixRef& to = part.d_history[head.array];
  std::ranges::fill(scratch.rows, 0.0F);
  copy_converted(head_rows(part.d_y[head.array], head.column, dim, 0, own),
                 MatrixView<float>(scratch.rows.data() + before * dim, own, dim));
  for (int64_t i = 0; i < to.rows; ++i)
    weighted_sum({tap(width_ - 1, head), -shape_.channels()},
                 {scratch.rows.data() + (before - to.rows + i) * dim, dim}, width_, dim,
                 to.as<float>().row(i) + head.column);
}

void CpuConvolutionKernel::backward(const ConvolutionPart& part) {
  for_each_head([&](const Head& head, Scratch& scratch) {
    const MatrixRef &d_z = part.d_y[head.array], &added = part.added[head.array];
    const int64_t dim = head.dim, all = d_z.rows, first_added = all - added.rows;
    float* const sum = scratch.value.data();
    for (int64_t begin = 0; begin < all; begin += recurrence_chunk) {
      const int64_t tokens = std::min(recurrence_chunk, all - begin);
      const int64_t read = std::min(tokens + width_ - 1, all - begin);
      std::ranges::fill(scratch.rows, 0.0F);
      copy_converted(head_rows(d_z, head.column, dim, begin, read),
                     MatrixView<float>(scratch.rows.data(), read, dim));
      for (int64_t t = 0; t < tokens; ++t) {
        weighted_sum({tap(width_ - 1, head), -shape_.channels()},
                     {scratch.rows.data() + t * dim, dim}, width_, dim, sum);
        for (int64_t c = 0; begin + t >= first_added && c < dim; ++c)
          sum[c] += added.as<float>()(begin + t - first_added, head.column + c);
        copy_converted(MatrixView<float>(sum, 1, dim),
                       head_rows(part.d_x[head.array], head.column, dim, begin + t, 1));
      }
    }
  });
}

}  // namespace gyre
