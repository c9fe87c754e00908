#include <cmath>

#include "recurrence/state_maps.hpp"
#include "runtime/for_rows.cuh"

namespace gyre {
namespace {

/// Element i of [heads, rows, columns] <- Σ_k left(row, k) right(k, column) + added.
struct Multiply {
  int64_t keys, columns, diagonal;  ///< diagonal: elements of a map that is one; 0: a matrix
  bool transposed;
  const float *left, *right, *added;  ///< added: null: nothing
  float* into;
  GYRE_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t column = i % columns, row = i / columns % keys, head = i / columns / keys;
    float sum = 0;
    if (diagonal > 0) {
      sum = left[head * diagonal + (diagonal > 1 ? row : 0)] * right[i];
    } else {
      const float* const m = left + head * keys * keys;
      const float* const from = right + head * keys * columns + column;
      for (int64_t k = 0; k < keys; ++k)
        sum += m[transposed ? k * keys + row : row * keys + k] * from[k * columns];
    }
    into[i] = added == nullptr ? sum : sum + added[i];
  }
};

/// Product of two diagonals.
struct MultiplyDiagonals {
  const float *left, *right;
  float* into;
  GYRE_HOST_DEVICE void operator()(int64_t i) const { into[i] = left[i] * right[i]; }
};

struct Identity {
  int64_t keys;
  bool matrix;
  float* map;
  GYRE_HOST_DEVICE void operator()(int64_t i) const {
    map[i] = !matrix || i / keys % keys == i % keys ? 1 : 0;
  }
};

/// exp of the sum of logarithms in double: one rounding.
struct MultiplyDecays {
  const float* g;
  int64_t tokens, stride;
  float* map;
  template <class Lanes>
  GYRE_HOST_DEVICE void operator()(int64_t i, const Lanes& lanes) const {
    double sum = 0;
    for (int64_t t = lanes.first; t < tokens; t += lanes.count) sum += g[t * stride + i];
    sum = lanes.sum(sum);
    if (lanes.first == 0) map[i] = static_cast<float>(std::exp(sum));
  }
};

}  // namespace

std::span<float> StateMaps::copy_of(std::span<const float> all, Buffer<float>& copy) {
  if (copy.size() < std::ssize(all)) copy = Buffer<float>(std::ssize(all), stream_.space());
  stream_.copy(copy.data(), all.data(), all.size_bytes());
  return copy.span().first(all.size());
}

void StateMaps::multiply(std::span<const float> left, bool transposed, std::span<const float> right,
                         int64_t columns, std::span<const float> added, std::span<float> into) {
  const int64_t diagonal = shape_.delta ? 0 : shape_.map_elements();
  for_elements(stream_, std::ssize(into),
               Multiply{shape_.key_dim, columns, diagonal, transposed, left.data(), right.data(),
                        added.data(), into.data()});
}

void StateMaps::apply(const RunMap& by, bool transposed, std::span<float> into) {
  multiply(by.map, transposed, copy_of(into, product_), shape_.value_dim, by.state, into);
}

void StateMaps::join(const RunMap& first, const RunMap& second, bool transposed,
                     std::span<float> map, std::span<float> state) {
  const std::span<float> before = copy_of(first.state, product_);
  // The results may be in the place of the factors.
  const RunMap left{copy_of(transposed ? first.map : second.map, first_), {}},
      right{copy_of(transposed ? second.map : first.map, second_), {}};
  multiply(transposed ? right.map : left.map, transposed, before, shape_.value_dim, second.state,
           state);
  if (shape_.delta)
    multiply(left.map, false, right.map, shape_.key_dim, {}, map);
  else
    for_elements(stream_, std::ssize(map),
                 MultiplyDiagonals{left.map.data(), right.map.data(), map.data()});
}

void StateMaps::identity(std::span<float> map, std::span<float> state) {
  stream_.fill(state.data(), std::byte{0}, state.size_bytes());
  for_elements(stream_, std::ssize(map), Identity{shape_.key_dim, shape_.delta, map.data()});
}

void StateMaps::decays(MatrixView<const float> g, std::span<float> map) {
  for_rows(stream_, std::ssize(map), MultiplyDecays{g.data, g.rows, g.stride, map.data()});
}

}  // namespace gyre
