#pragma once
// Device memory that a call of a GPU's kernel of a recurrence needs besides its arrays.

#include <algorithm>
#include <cstdint>

#include "core/index.hpp"
#include "recurrence/kind.hpp"

namespace gyre {

/// The largest key_dim of a GPU's kernel.
inline constexpr int64_t cuda_recurrence_largest_key_dim = 256;
/// Scratch of a call, if the heads of one head of keys need no more.
inline constexpr int64_t device_scratch_bytes = int64_t{1} << 32;

/// Elements of f32 for each chunk and head of values.
struct DeviceScratch {
  int64_t square = recurrence_chunk * recurrence_chunk;  ///< P; with the delta rule, R and X
  int64_t state = 0, values = 0, keys = 0;               ///< those of a state; C V and C K
  bool delta = false, backward = false;

  DeviceScratch(const RecurrenceShape& shape, bool backward_)
      : state(shape.state_elements()),
        values(recurrence_chunk * shape.value_dim),
        keys(recurrence_chunk * shape.key_dim),
        delta(shape.delta),
        backward(backward_) {}
  int64_t elements() const {
    const int64_t tiles = (delta ? 3 : 1) * square;
    return tiles + (backward ? 2 * state + (delta ? 2 * values : 0) + 2 * keys : 0);
  }
};

/// Heads of values that a call of this many tokens computes at once: a multiple of the group of a
/// head of keys. `limit`: bytes that it may need.
inline int64_t heads_at_once(const RecurrenceShape& shape, int64_t tokens, bool backward,
                             int64_t limit = device_scratch_bytes) {
  const int64_t of_head = ceil_div(tokens, recurrence_chunk) * 4 *
                          DeviceScratch(shape, backward).elements() * shape.group();
  const int64_t key_heads = of_head > 0 ? limit / of_head : shape.key_heads;
  return std::clamp<int64_t>(key_heads, 1, shape.key_heads) * shape.group();
}

/// Bytes of scratch of a call of this many tokens.
inline int64_t scratch_bytes(const RecurrenceShape& shape, int64_t tokens, bool backward) {
  return heads_at_once(shape, tokens, backward) * ceil_div(tokens, recurrence_chunk) * 4 *
         DeviceScratch(shape, backward).elements();
}

}  // namespace gyre
