#pragma once
// Random inputs of a recurrence, which every rank can generate itself (core/token_random.hpp).

#include <cstdint>
#include <span>
#include <vector>

#include "core/dtype.hpp"
#include "recurrence/kind.hpp"

namespace gyre {

/// Fills a token's row of an input: q and k of length 1 in each head, v and d_out nearly normal,
/// beta = sigmoid(x) and g = -exp(x - 3) of nearly normal x, so that a state is halved in some ten
/// tokens. With a convolution, q and k are nearly normal. Values of q, k, v and d_out are rounded to
/// `type`.
void fill_recurrence_row(const RecurrenceShape& shape, uint64_t seed, DType type,
                         RecurrenceArray array, int64_t token, std::span<float> row);
/// Weights of the convolution [channels, width], nearly normal over sqrt(width).
std::vector<float> random_weights(const RecurrenceShape& shape, uint64_t seed);

}  // namespace gyre
