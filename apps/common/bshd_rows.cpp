#include "apps/common/bshd_rows.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "packing/padding.hpp"

namespace gyre {
namespace {

/// Segments of row `row` that hold tokens.
int64_t documents_of_row(const BshdArrays& arrays, int64_t row) {
  const auto begin = arrays.seq_lens.begin() + row * arrays.segments_per_row;
  return std::count_if(begin, begin + arrays.segments_per_row,
                       [&](int64_t length) { return length > 0 && length != arrays.sentinel; });
}

PositionIds positions_of(const BshdArrays& arrays) {
  if (std::ssize(arrays.positions) == arrays.position_axes * arrays.rows * arrays.slots &&
      !arrays.positions.empty())
    return {arrays.position_axes, arrays.positions};
  for (int64_t row = 0; row < arrays.rows; ++row)
    if (const int64_t documents = documents_of_row(arrays, row); documents > 1)
      throw_usage(
          "row {} has {} documents and no positions of its own (position_ids is {}): they would "
          "merge",
          row, documents, arrays.positions.empty() ? "absent" : "one row for all");
  return {1, broadcast_positions(arrays.positions, arrays.rows, arrays.slots)};
}

}  // namespace

BshdBatch batch_of(const BshdArrays& arrays) {
  BshdBatch batch;
  batch.rows = arrays.rows;
  batch.slots = arrays.slots;
  if (arrays.hidden == 0)
    batch.inputs = arrays.ids;
  else
    batch.inputs = TokenEmbeddings{arrays.hidden, arrays.embeddings};
  batch.labels = arrays.labels;
  batch.positions = positions_of(arrays);
  batch.seq_lens = LengthTable{arrays.rows, arrays.segments_per_row, arrays.seq_lens};
  batch.seq_lens_padded = LengthTable{arrays.rows, arrays.segments_per_row, arrays.seq_lens_padded};
  return batch;
}

std::vector<uint8_t> real_slots(const BshdArrays& arrays) {
  std::vector<uint8_t> real(static_cast<size_t>(arrays.rows * arrays.slots), 0);
  for (int64_t row = 0; row < arrays.rows; ++row) {
    int64_t begin = row * arrays.slots;
    for (int64_t i = 0; i < arrays.segments_per_row; ++i) {
      const auto cell = static_cast<size_t>(row * arrays.segments_per_row + i);
      if (arrays.seq_lens[cell] == arrays.sentinel) continue;
      std::fill_n(real.begin() + begin, arrays.seq_lens[cell], uint8_t{1});
      begin += arrays.seq_lens_padded[cell];
    }
  }
  return real;
}

int64_t most_documents_of_row(const BshdArrays& arrays) {
  int64_t most = 0;
  for (int64_t row = 0; row < arrays.rows; ++row)
    most = std::max(most, documents_of_row(arrays, row));
  return most;
}

}  // namespace gyre
