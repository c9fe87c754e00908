#pragma once
// What the routines on split vocabularies share: checks of arguments, the distribution of rows,
// messages, and the coefficients of gradients.

#include <algorithm>
#include <span>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "logprobs/row_gradient.hpp"

namespace gyre {

/// Throws a usage error if tokens < 0.
void check_tokens(int64_t tokens);

/// Throws a usage error unless the temperature and its inverse in f32 are positive and finite.
void check_temperature(double temperature);
/// The inverse, which logits are multiplied by.
float scale_of(double temperature);

/// All ranks throw the same usage error, which names `what` and `name`, unless all of them have the
/// same value. Collective: one small all-gather.
void agree_on_number(Communicator& tp, std::string_view what, std::string_view name, double value);

/// The first item of part `part`, when `count` items are split into `parts` parts, in order and as
/// evenly as possible: the first count % parts get one more. `part` may be `parts`: the end.
inline int64_t first_dealt(int64_t count, int64_t parts, int64_t part) {
  return count / parts * part + std::min(part, count % parts);
}

/// Throws unless `arrays` are the ranks of `tp` in their order and, where there are several, of
/// this memory.
void check_arrays(const Communicator& tp, const Communicator& arrays, MemorySpace space);

/// Adds a message, or a part of one, in slices: one MPI call takes less than 2 GiB.
template <class Slice, class Byte>
void add_slices(int peer, std::span<Byte> data, std::vector<Slice>& slices) {
  constexpr size_t longest = size_t{1} << 30;
  for (; data.size() > longest; data = data.subspan(longest))
    slices.push_back({peer, data.first(longest)});
  slices.push_back({peer, data});
}

/// The coefficients of row_gradient for a row: g is the sum of the gradients of its
/// log-probabilities, h the gradient of its entropy. If h is 0, `entropy` is not used.
RowSlope slope_of(double g, double h, double entropy, double scale);

}  // namespace gyre
