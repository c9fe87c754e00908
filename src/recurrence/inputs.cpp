#include "recurrence/inputs.hpp"

#include <cmath>

#include "core/bf16.hpp"
#include "core/token_random.hpp"

namespace gyre {
namespace {

void normalise(std::span<float> head) {
  double square = 0;
  for (const double x : head) square += x * x;
  const double factor = square > 0 ? 1 / std::sqrt(square) : 0;
  for (float& x : head) x = static_cast<float>(x * factor);
}

constexpr uint32_t first_tensor = 64;  // beyond those that have a name

TokenTensor tensor_of(uint32_t index) {
  return static_cast<TokenTensor>(first_tensor + index);
}

}  // namespace

void fill_recurrence_row(const RecurrenceShape& shape, uint64_t seed, DType type,
                         RecurrenceArray array, int64_t token, std::span<float> row) {
  fill_token_row({seed, tensor_of(static_cast<uint32_t>(array)), false}, token, row);
  const size_t dim = dim_of(shape, array);
  const bool is_unit =
      shape.convolution == 0 && (array == RecurrenceArray::q || array == RecurrenceArray::k);
  for (size_t at = 0; is_unit && at < row.size(); at += dim) normalise(row.subspan(at, dim));
  for (float& x : row) {
    if (array == RecurrenceArray::g)
      x = -std::exp(x - 3);
    else if (array == RecurrenceArray::beta)
      x = 1 / (1 + std::exp(-x));
    else if (type == DType::bf16)
      x = to_float(to_bf16(x));
  }
}

std::vector<float> random_weights(const RecurrenceShape& shape, uint64_t seed) {
  const int64_t width = shape.convolution;
  std::vector<float> weights(shape.channels() * width);
  for (int64_t channel = 0; channel < shape.channels(); ++channel) {
    const std::span<float> row = std::span(weights).subspan(channel * width, width);
    fill_token_row({seed, tensor_of(recurrence_arrays), false}, channel, row);
    for (float& x : row) x /= std::sqrt(static_cast<float>(width));
  }
  return weights;
}

}  // namespace gyre
