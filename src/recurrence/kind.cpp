#include "recurrence/kind.hpp"

namespace gyre {

const std::vector<RecurrenceKind>& recurrence_kinds() {
  static const std::vector<RecurrenceKind> all = {
      {"gdn", "gated delta rule: a decay of each head (Qwen3-Next, Gated DeltaNet)", false, true},
      {"kda", "delta rule with a decay of each channel (Kimi Delta Attention)", true, true},
      {"ssd", "a decay of each head, no delta rule (Mamba-2, Lightning Attention)", false, false},
      {"gla", "a decay of each channel, no delta rule (gated linear attention)", true, false}};
  return all;
}

const char* name_of(RecurrenceArray array) {
  static constexpr const char* names[recurrence_arrays] = {
      "q", "k", "v", "g", "beta", "d_out", "out", "d_q", "d_k", "d_v", "d_g", "d_beta"};
  return names[static_cast<int>(array)];
}

bool has_array(const RecurrenceShape& shape, RecurrenceArray array) {
  return shape.delta || (array != RecurrenceArray::beta && array != RecurrenceArray::d_beta);
}

int64_t heads_of(const RecurrenceShape& shape, RecurrenceArray array) {
  switch (array) {
    case RecurrenceArray::q:
    case RecurrenceArray::k:
    case RecurrenceArray::d_q:
    case RecurrenceArray::d_k:
      return shape.key_heads;
    default:
      return shape.value_heads;
  }
}

int64_t dim_of(const RecurrenceShape& shape, RecurrenceArray array) {
  switch (array) {
    case RecurrenceArray::q:
    case RecurrenceArray::k:
    case RecurrenceArray::d_q:
    case RecurrenceArray::d_k:
      return shape.key_dim;
    case RecurrenceArray::g:
    case RecurrenceArray::d_g:
      return shape.decay_dim();
    case RecurrenceArray::beta:
    case RecurrenceArray::d_beta:
      return 1;
    default:
      return shape.value_dim;
  }
}

int64_t bytes_of_arrays(const RecurrenceShape& shape, DType activations, int64_t rows) {
  int64_t bytes = 0;
  for (int a = 0; a < recurrence_arrays; ++a) {
    const auto array = static_cast<RecurrenceArray>(a);
    if (has_array(shape, array))
      bytes += rows * width_of(shape, array) *
               static_cast<int64_t>(size_of(stored_type(array, activations)));
  }
  return bytes;
}

DType stored_type(RecurrenceArray array, DType activations) {
  switch (array) {
    case RecurrenceArray::g:
    case RecurrenceArray::beta:
    case RecurrenceArray::d_g:
    case RecurrenceArray::d_beta:
      return DType::f32;
    default:
      return activations;
  }
}

}  // namespace gyre
