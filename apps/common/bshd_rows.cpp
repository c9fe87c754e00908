#include "apps/common/bshd_rows.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/rolled_labels.hpp"
#include "packing/padding.hpp"

namespace gyre {
namespace {

/// Number of segments of row `row` that hold tokens; 1 without tables.
int64_t documents_of_row(const BshdArrays& arrays, int64_t row) {
  if (!arrays.seq_lens) return 1;
  const auto begin = arrays.seq_lens->begin() + row * arrays.segments_per_row;
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
          "row {} has {} documents and no positions of its own (position_ids is {}): "
          "they would merge",
          row, documents, arrays.positions.empty() ? "absent" : "one row for all");
  return {1, broadcast_positions(arrays.positions, arrays.rows, arrays.slots)};
}

/// Whether all padding is at the ends of rows.
bool rows_end_in_padding(const BshdArrays& arrays) {
  for (int64_t row = 0; row < arrays.rows; ++row) {
    const auto begin = arrays.ids.begin() + row * arrays.slots, end = begin + arrays.slots;
    const auto is_padding = [&](int64_t id) { return id == *arrays.pad_id; };
    if (!std::all_of(std::find_if(begin, end, is_padding), end, is_padding)) return false;
  }
  return true;
}

/// The streams of rows without tables of lengths. Only their padding masks are used.
std::vector<ThdBatch> streams_of_ids(const BshdArrays& arrays, int64_t chunks) {
  BshdBatch batch;
  batch.rows = arrays.rows;
  batch.slots = arrays.slots;
  batch.inputs = arrays.ids;
  batch.labels = arrays.labels;
  ThdOptions options;
  options.pad_id = *arrays.pad_id;
  try {
    return split_into_chunks(batch, chunks, options);
  } catch (const Error& error) {
    if (chunks >= arrays.rows || arrays.rows % chunks != 0 || !rows_end_in_padding(arrays)) throw;
    throw_usage("{}; --chunks {} makes a stream of each row", error.what(), arrays.rows);
  }
}

std::optional<LengthTable> table_of(const BshdArrays& arrays,
                                    const std::optional<std::vector<int64_t>>& cells) {
  if (!cells) return {};
  return LengthTable{arrays.rows, arrays.segments_per_row, *cells};
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
  batch.seq_lens = table_of(arrays, arrays.seq_lens);
  batch.seq_lens_padded = table_of(arrays, arrays.seq_lens_padded);
  for (const auto& [name, stored] : arrays.extras) batch.extras.emplace(name, stored.extra);
  return batch;
}

void add_tables_of_rows(BshdBatch& batch, const BshdArrays& arrays, int64_t chunks) {
  LengthTable real{arrays.rows, 1, {}}, slots = real;
  for (const ThdBatch& stream : streams_of_ids(arrays, chunks))
    for (int64_t row = 0; row < arrays.rows / chunks; ++row) {
      const auto mask = std::span(stream.padding_mask).subspan(row * arrays.slots, arrays.slots);
      const int64_t tokens = count_real_tokens(mask);
      real.cells.push_back(tokens > 0 ? tokens : arrays.sentinel);
      slots.cells.push_back(tokens > 0 ? arrays.slots : arrays.sentinel);
    }
  batch.seq_lens = std::move(real);
  batch.seq_lens_padded = std::move(slots);
}

Tail tail_of(const BshdArrays& arrays, const std::string& name) {
  if (name == "own-segment") return Tail::own_segment;
  return name == "absorb" && arrays.seq_lens_padded ? Tail::absorb : Tail::keep;
}

void check_padding_of_rows(const BshdArrays& arrays) {
  for (int64_t row = 0; row < arrays.rows; ++row) {
    const auto begin = arrays.ids.begin() + row * arrays.slots, end = begin + arrays.slots;
    const auto is_content = [&](int64_t id) { return id != *arrays.pad_id; };
    const auto content = std::find_if(begin, end, is_content);
    const auto padding = std::find(content, end, *arrays.pad_id);
    if (std::any_of(padding, end, is_content))
      throw_usage(
          "row {}, slot {} holds the pad id {} between other ids: without seq_lens padding is only "
          "known at the ends of a row",
          row, padding - begin, *arrays.pad_id);
  }
}

std::vector<uint8_t> real_slots(const BshdArrays& arrays) {
  std::vector<uint8_t> real(arrays.rows * arrays.slots, 0);
  if (!arrays.seq_lens) {
    std::transform(arrays.ids.begin(), arrays.ids.end(), real.begin(),
                   [&](int64_t id) { return static_cast<uint8_t>(id != *arrays.pad_id ? 1 : 0); });
    return real;
  }
  const std::vector<int64_t>& lengths = *arrays.seq_lens;
  const std::vector<int64_t>& slots = arrays.seq_lens_padded ? *arrays.seq_lens_padded : lengths;
  for (int64_t row = 0; row < arrays.rows; ++row) {
    int64_t begin = row * arrays.slots;
    for (int64_t i = 0; i < arrays.segments_per_row; ++i) {
      const size_t cell = row * arrays.segments_per_row + i;
      if (lengths[cell] == arrays.sentinel) continue;
      std::fill_n(real.begin() + begin, lengths[cell], uint8_t{1});
      begin += slots[cell];
    }
  }
  return real;
}

void check_labels(const BshdArrays& arrays) {
  std::vector<uint8_t> padding = real_slots(arrays);
  for (uint8_t& slot : padding) slot = slot == 0 ? 1 : 0;
  const int64_t slot = find_rolled_label<int64_t>(arrays.ids, arrays.labels, padding, arrays.slots);
  if (slot >= 0)
    throw_usage("row {}, slot {} {}", slot / arrays.slots, slot % arrays.slots, rolled_label_text);
}

int64_t max_documents_of_row(const BshdArrays& arrays) {
  int64_t most = 0;
  for (int64_t row = 0; row < arrays.rows; ++row)
    most = std::max(most, documents_of_row(arrays, row));
  return most;
}

}  // namespace gyre
