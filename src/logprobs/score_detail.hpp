#pragma once
// Functions that the routines on sharded vocabularies share: they check arguments, distribute rows,
// exchange messages, and compute gradient coefficients.

#include <algorithm>
#include <span>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "logprobs/rows/row_gradient.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

/// Throws a usage error if tokens < 0.
void check_tokens(int64_t tokens);

/// Throws a usage error unless the temperature and its inverse in f32 are positive and finite.
void check_temperature(double temperature);
/// Inverse of the temperature, which multiplies the logits.
float scale_of(double temperature);

/// Throws a usage error unless there is a temperature for each of `tokens` tokens, or none, and
/// each is one that check_temperature() accepts.
void check_temperatures(std::span<const double> temperatures, int64_t tokens);
/// Returns the inverses of the temperatures, [tokens].
Buffer<float> scales_of(std::span<const double> temperatures);
/// The address for RowScale: null without factors of rows.
inline const float* scales_of_rows(const Buffer<float>& scales) {
  return scales.size() == 0 ? nullptr : scales.data();
}

/// All ranks throw the same usage error, which names `what` and `name`, if the values differ
/// between ranks. Collective: one small all-gather.
void agree_on_number(Communicator& tp, std::string_view what, std::string_view name, double value);

/// First item of part `part` if `count` items are distributed over `parts` parts, in order and
/// evenly: the first count % parts parts get one more. `part` may be `parts`: returns count.
inline int64_t first_dealt(int64_t count, int64_t parts, int64_t part) {
  return count / parts * part + std::min(part, count % parts);
}

/// Throws unless `arrays` has the ranks of `tp` in the same order and, with several ranks, this
/// memory space.
void check_arrays(const Communicator& tp, const Communicator& arrays, MemorySpace space);

/// Appends `data` as slices of at most 1 GiB, because one MPI call takes less than 2 GiB.
template <class Slice, class Byte>
void add_slices(int peer, std::span<Byte> data, std::vector<Slice>& slices) {
  constexpr size_t longest = size_t{1} << 30;
  for (; data.size() > longest; data = data.subspan(longest))
    slices.push_back({peer, data.first(longest)});
  slices.push_back({peer, data});
}

/// Upstream gradients of the scores of one row.
struct ScoreSlopes {
  double logprobs = 0;  ///< summed over its ids
  double entropy = 0, log_sum_exp = 0, mean_logprob = 0;

  /// Coefficients of row_gradient, for a vocabulary of `ids`. `row_entropy` is not used if the
  /// gradient of the entropy is 0.
  GradientCoefficients coefficients(double row_entropy, double scale, int64_t ids) const;
};

}  // namespace gyre
