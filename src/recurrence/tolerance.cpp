#include "recurrence/tolerance.hpp"

#include <cmath>

#include "core/error.hpp"

namespace gyre {
namespace {

double roundings(const RecurrenceShape& shape, const RecurrenceReductions& lengths,
                 RecurrenceArray array) {
  const double keys = shape.key_dim, values = shape.value_dim, chunk = recurrence_chunk;
  const double tokens = lengths.tokens, maps = lengths.maps;
  const double width = shape.convolution, convolved = width > 0 ? width + keys + 8 : 0;
  const double state = 2 * (keys + chunk) + tokens + maps * keys + 1 + 2 * convolved;
  const double out = state + keys + chunk + convolved;
  const double d_v = state + out + values + 2 * convolved;
  const double d_q = state + 2 * values + chunk + 2 * convolved;
  const double d_k = state + d_v + 2 * values + chunk;
  switch (array) {
    case RecurrenceArray::out:
      return out;
    case RecurrenceArray::d_q:
      return d_q;
    case RecurrenceArray::d_k:
      return d_k;
    case RecurrenceArray::d_v:
    case RecurrenceArray::d_beta:
      return d_v;
    case RecurrenceArray::d_g:
      return d_q + d_k + keys + chunk;
    default:
      break;
  }
  GYRE_CHECK(false, "{} is an input", name_of(array));
  return 0;
}

}  // namespace

double recurrence_tolerance(const RecurrenceShape& shape, const RecurrenceReductions& lengths,
                            RecurrenceArray array, DType type) {
  const bool narrow = stored_type(array, type) == DType::bf16;
  return mixed_tolerance(roundings(shape, lengths, array), narrow ? 1 : 0);
}

double weights_tolerance(const RecurrenceShape& shape, const RecurrenceReductions& lengths) {
  return mixed_tolerance(roundings(shape, lengths, RecurrenceArray::d_k) + recurrence_chunk +
                             static_cast<double>(lengths.ranks),
                         0);
}

double recurrence_sigma(const RecurrenceShape& shape, const RecurrenceReductions& lengths,
                        RecurrenceArray array, DType type) {
  if (stored_type(array, type) != DType::bf16) return 0;
  return std::hypot(mixed_tolerance(roundings(shape, lengths, array), 0) / tolerance_safety,
                    narrow_deviation * epsilon_of(DType::bf16));
}

}  // namespace gyre
