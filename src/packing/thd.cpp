#include "packing/thd.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/index.hpp"

namespace gyre {
namespace {

struct Segment {
  int64_t real;
  int64_t slots;
};

/// Reads segments from the length tables. Messages number rows from `first_row`.
class SegmentReader {
 public:
  SegmentReader(const BshdBatch& batch, const ThdOptions& options, int64_t first_row)
      : real_(*batch.seq_lens),
        padded_(batch.seq_lens_padded ? *batch.seq_lens_padded : *batch.seq_lens),
        name_(batch.seq_lens_padded ? "seq_lens_padded" : "seq_lens"),
        options_(options),
        rows_(batch.rows),
        slots_(batch.slots),
        first_row_(first_row) {}

  std::vector<Segment> read() const {
    std::vector<std::vector<Segment>> by_row;
    for (int64_t row = 0; row < rows_; ++row) by_row.push_back(read_row(row));
    while (!by_row.empty() && by_row.back().empty()) by_row.pop_back();  // rows of padding
    std::vector<Segment> segments;
    int64_t covered = 0;
    for (int64_t row = 0; row < std::ssize(by_row); ++row) {
      std::vector<Segment>& mine = by_row[row];
      if (mine.empty())
        throw_usage(
            "row {}: it has no segment, but a row after it has one; declare it as one segment of "
            "real length 0 and slot length {}",
            first_row_ + row, slots_);
      const bool last = row + 1 == std::ssize(by_row);
      check_sum(row, mine, last && options_.allow_undeclared_tail);
      if (options_.tail == Tail::own_segment) split_tail(mine);
      for (const Segment& segment : mine) covered += segment.slots;
      segments.insert(segments.end(), mine.begin(), mine.end());
    }
    if (options_.tail == Tail::own_segment && covered < rows_ * slots_)
      segments.push_back({0, rows_ * slots_ - covered});
    return segments;
  }

 private:
  bool is_segment(int64_t row, int64_t column) const {
    return padded_.at(row, column) != options_.sentinel;
  }

  std::vector<Segment> read_row(int64_t row) const {
    std::vector<Segment> segments;
    for (int64_t column = 0; column < padded_.columns; ++column) {
      check_cell(row, column);
      if (is_segment(row, column))
        segments.push_back({real_.at(row, column), padded_.at(row, column)});
    }
    return segments;
  }

  void check_cell(int64_t row, int64_t column) const {
    const int64_t real = real_.at(row, column), slots = padded_.at(row, column);
    const int64_t multiple = options_.slot_multiple, number = first_row_ + row;
    if ((real == options_.sentinel) != (slots == options_.sentinel))
      throw_usage(
          "row {}, segment {}: seq_lens is {} and seq_lens_padded {}; "
          "both or neither must be the sentinel {}",
          number, column, real, slots, options_.sentinel);
    if (real == options_.sentinel) return;
    if (real < 0)
      throw_usage(
          "row {}, segment {}: real length {} is negative and not the sentinel {}; "
          "the least is 0",
          number, column, real, options_.sentinel);
    if (slots > slots_)
      throw_usage("row {}, segment {}: slot length {} exceeds the row; at most {} fit", number,
                  column, slots, slots_);
    if (real > slots)
      throw_usage("row {}, segment {}: real length {} exceeds its slot length; at most {} fit",
                  number, column, real, slots);
    if (slots % multiple != 0)
      throw_usage(
          "row {}, segment {}: slot length {} is not a multiple of {} (2·cp); "
          "the next valid one is {}",
          number, column, slots, multiple, round_up(slots, multiple));
  }

  void check_sum(int64_t row, const std::vector<Segment>& segments, bool may_end_early) const {
    int64_t sum = 0;
    for (const Segment& segment : segments) sum += segment.slots;
    const int64_t multiple = options_.slot_multiple, number = first_row_ + row;
    if (sum < slots_ && may_end_early) {
      if ((slots_ - sum) % multiple != 0)
        throw_usage(
            "row {}: {} slots after its last segment are not a multiple of {} (2·cp); the next "
            "valid row width is {}",
            number, slots_ - sum, multiple, sum + round_up(slots_ - sum, multiple));
      return;
    }
    if (sum == slots_) return;
    const Segment& last = segments.back();
    const int64_t fitting = last.slots + slots_ - sum;
    const std::string advice =
        fitting >= last.real ? fmt::format("; a last slot length of {} instead of {} would fill it",
                                           fitting, last.slots)
                             : "";
    throw_usage("row {}: {} sums to {}, but a row has {} slots{}", number, name_, sum, slots_,
                advice);
  }

  /// Moves the slots that the last segment of a row does not need into a segment of their own.
  void split_tail(std::vector<Segment>& row) const {
    Segment& last = row.back();
    const int64_t needed = round_up(last.real, options_.slot_multiple);
    if (last.real == 0 || needed == last.slots) return;
    const int64_t rest = last.slots - needed;
    last.slots = needed;
    row.push_back({0, rest});
  }

  const LengthTable& real_;
  const LengthTable& padded_;
  const char* name_;
  const ThdOptions& options_;
  int64_t rows_, slots_, first_row_;
};

void check_table(const std::optional<LengthTable>& table, const char* name, int64_t rows) {
  if (!table) return;
  if (table->columns < 0 || table->rows != rows ||
      std::ssize(table->cells) != rows * table->columns)
    throw_usage("{} is [{}, {}] and holds {} cells; a batch of {} rows needs {} rows of cells",
                name, table->rows, table->columns, table->cells.size(), rows, rows);
}

void check_metadata(const BshdBatch& batch, const ThdOptions& options) {
  if (batch.rows < 0 || batch.slots < 0)
    throw_usage("a batch of {} rows of {} slots; neither may be negative", batch.rows, batch.slots);
  if (options.slot_multiple < 1)
    throw_usage("slot_multiple must be at least 1, not {}", options.slot_multiple);
  if (batch.seq_lens_padded && !batch.seq_lens)
    throw_usage("seq_lens_padded is given without seq_lens: real lengths are unknown");
  check_table(batch.seq_lens, "seq_lens", batch.rows);
  check_table(batch.seq_lens_padded, "seq_lens_padded", batch.rows);
  if (batch.seq_lens_padded && batch.seq_lens_padded->columns != batch.seq_lens->columns)
    throw_usage("seq_lens has {} columns and seq_lens_padded {}; they must be equal",
                batch.seq_lens->columns, batch.seq_lens_padded->columns);
}

/// Throws if the last boundary of the stream would exceed int32.
void check_range(const BshdBatch& batch, int64_t first_row) {
  if (batch.slots == 0 || batch.rows <= max_slots / batch.slots) return;
  const int64_t fitting = max_slots / batch.slots;
  throw_usage(
      "row {}: its boundaries exceed the int32 range of cu_seqlens; "
      "at most {} rows of {} slots fit",
      first_row + fitting, fitting, batch.slots);
}

void check_size(const std::string& name, int64_t held, int64_t needed, int64_t rows,
                int64_t slots) {
  if (held != needed)
    throw_usage("{} holds {} values; {} rows of {} slots need {}", name, held, rows, slots, needed);
}

void check_arrays(const BshdBatch& batch) {
  const int64_t rows = batch.rows, slots = batch.slots, total = rows * slots;
  if (const auto* ids = std::get_if<TokenIds>(&batch.inputs)) {
    check_size("input_ids", ids->size(), total, rows, slots);
  } else {
    const auto& embeddings = std::get<TokenEmbeddings>(batch.inputs);
    if (embeddings.hidden < 1)
      throw_usage("the hidden size of embeddings must be at least 1, not {}", embeddings.hidden);
    if (!batch.seq_lens)
      throw_usage("embeddings need seq_lens: padding cannot be told from their values");
    check_size(fmt::format("inputs_embeds of hidden size {}", embeddings.hidden),
               embeddings.values.size(), total * embeddings.hidden, rows, slots);
  }
  check_size("labels", batch.labels.size(), total, rows, slots);
  if (batch.positions) {
    if (batch.positions->axes < 1)
      throw_usage("position_ids must have at least 1 axis, not {}", batch.positions->axes);
    check_size(fmt::format("position_ids of {} axes", batch.positions->axes),
               batch.positions->values.size(), total * batch.positions->axes, rows, slots);
  }
  for (const auto& [name, extra] : batch.extras) {
    if (extra.aligned == Extra::Aligned::none) continue;
    const int64_t items = extra.aligned == Extra::Aligned::rows ? rows : total;
    const int64_t held = extra.bytes ? extra.bytes->size() : 0;
    if (!extra.bytes || extra.item_bytes < 1 || held != items * extra.item_bytes)
      throw_usage("extra '{}' holds {} bytes; {} items of {} bytes need {}", name, held, items,
                  extra.item_bytes, items * extra.item_bytes);
  }
}

/// Marks slots with the pad id as padding, for batches without seq_lens.
std::vector<uint8_t> mask_by_pad_id(const BshdBatch& batch, int64_t pad_id, int64_t first_row) {
  const auto& ids = std::get<TokenIds>(batch.inputs);
  size_t end = ids.size();
  while (end > 0 && ids[end - 1] == pad_id) --end;
  const auto content_end = ids.begin() + end;
  if (const auto hit = std::find(ids.begin(), content_end, pad_id); hit != content_end) {
    const int64_t slot = hit - ids.begin();
    throw_usage(
        "row {}, slot {} holds the pad id {} before real tokens: without seq_lens padding is only "
        "known at the end of the stream",
        first_row + slot / batch.slots, slot % batch.slots, pad_id);
  }
  std::vector<uint8_t> mask(ids.size(), 0);
  std::fill(mask.begin() + end, mask.end(), uint8_t{1});
  return mask;
}

std::vector<uint8_t> mask_by_segments(const std::vector<Segment>& segments, int64_t slots) {
  std::vector<uint8_t> mask(slots, 1);
  auto at = mask.begin();
  for (const Segment& segment : segments) {
    std::fill_n(at, segment.real, uint8_t{0});
    at += segment.slots;
  }
  return mask;
}

/// Applies Tail::absorb; returns whether it applied.
bool absorb_tail(std::vector<int32_t>& cu, std::vector<int32_t>& cup, int64_t slots) {
  if (cu.size() < 2 || !std::equal(cu.begin(), cu.end() - 1, cup.begin()) || cu.back() >= slots)
    return false;
  cu.back() = static_cast<int32_t>(slots);
  cup = cu;
  return true;
}

void set_bounds(ThdBatch& thd, const std::vector<Segment>& segments, bool may_absorb) {
  std::vector<int32_t> cu = {0}, cup = {0};
  for (const Segment& segment : segments) {
    cu.push_back(cu.back() + static_cast<int32_t>(segment.real));
    cup.push_back(cup.back() + static_cast<int32_t>(segment.slots));
  }
  thd.absorbed = may_absorb && absorb_tail(cu, cup, thd.slots);
  // Computed after absorption: kernels write out of bounds when a segment is wider than this.
  int32_t widest = 0;
  for (size_t i = 0; i + 1 < cu.size(); ++i) widest = std::max(widest, cu[i + 1] - cu[i]);
  thd.max_seqlen = widest;
  if (cup != cu) thd.cu_seqlens_padded = std::move(cup);
  thd.cu_seqlens = std::move(cu);
}

ThdBatch convert(BshdBatch batch, const ThdOptions& options, int64_t first_row) {
  check_metadata(batch, options);
  check_range(batch, first_row);
  std::vector<Segment> segments;
  if (batch.seq_lens) segments = SegmentReader(batch, options, first_row).read();
  check_arrays(batch);

  ThdBatch thd;
  thd.slots = batch.rows * batch.slots;
  if (batch.seq_lens) {
    thd.padding_mask = mask_by_segments(segments, thd.slots);
    set_bounds(thd, segments, options.tail == Tail::absorb && batch.seq_lens_padded.has_value());
  } else {
    thd.padding_mask = mask_by_pad_id(batch, options.pad_id, first_row);
  }
  thd.inputs = std::move(batch.inputs);
  thd.labels = std::move(batch.labels);
  thd.positions = std::move(batch.positions);
  thd.extras = std::move(batch.extras);
  return thd;
}

template <class T>
std::vector<T> slice(const std::vector<T>& values, int64_t first, int64_t count) {
  const auto begin = values.begin() + first;
  return {begin, begin + count};
}

/// Rows [first, first + rows) of a batch. Precondition: its arrays have the right sizes.
BshdBatch slice_rows(const BshdBatch& batch, int64_t first, int64_t rows) {
  const int64_t begin = first * batch.slots, count = rows * batch.slots;
  BshdBatch part;
  part.rows = rows;
  part.slots = batch.slots;
  if (const auto* ids = std::get_if<TokenIds>(&batch.inputs)) {
    part.inputs = slice(*ids, begin, count);
  } else {
    const auto& [hidden, values] = std::get<TokenEmbeddings>(batch.inputs);
    part.inputs = TokenEmbeddings{hidden, slice(values, begin * hidden, count * hidden)};
  }
  part.labels = slice(batch.labels, begin, count);
  if (batch.positions) {
    part.positions = PositionIds{batch.positions->axes, {}};
    for (int64_t axis = 0; axis < batch.positions->axes; ++axis) {
      const auto values =
          slice(batch.positions->values, axis * batch.rows * batch.slots + begin, count);
      part.positions->values.insert(part.positions->values.end(), values.begin(), values.end());
    }
  }
  const auto cut = [&](const std::optional<LengthTable>& table) -> std::optional<LengthTable> {
    if (!table) return std::nullopt;
    return LengthTable{rows, table->columns,
                       slice(table->cells, first * table->columns, rows * table->columns)};
  };
  part.seq_lens = cut(batch.seq_lens);
  part.seq_lens_padded = cut(batch.seq_lens_padded);
  for (const auto& [name, extra] : batch.extras) {
    Extra mine = extra;
    const int64_t per_row =
        extra.item_bytes * (extra.aligned == Extra::Aligned::slots ? batch.slots : 1);
    if (extra.aligned != Extra::Aligned::none)
      mine.bytes = std::make_shared<const std::vector<std::byte>>(
          slice(*extra.bytes, first * per_row, rows * per_row));
    part.extras.emplace(name, std::move(mine));
  }
  return part;
}

StackedBounds stack(const std::vector<std::span<const int32_t>>& rows, int32_t sentinel) {
  StackedBounds stacked{std::ssize(rows), 0, {}};
  for (const auto& row : rows) stacked.columns = std::max(stacked.columns, std::ssize(row));
  for (const auto& row : rows) {
    stacked.cells.insert(stacked.cells.end(), row.begin(), row.end());
    stacked.cells.insert(stacked.cells.end(), stacked.columns - row.size(), sentinel);
  }
  return stacked;
}

}  // namespace

ThdBatch to_thd(BshdBatch batch, const ThdOptions& options) {
  return convert(std::move(batch), options, 0);
}

std::vector<ThdBatch> split_into_chunks(const BshdBatch& batch, int64_t chunks,
                                        const ThdOptions& options) {
  if (chunks < 1) throw_usage("the number of chunks must be at least 1, not {}", chunks);
  if (batch.rows % chunks != 0) {
    int64_t fewer = std::min(chunks, batch.rows), more = chunks;
    while (batch.rows % fewer != 0) --fewer;
    while (more < batch.rows && batch.rows % more != 0) ++more;
    throw_usage("a batch of {} rows cannot be cut into {} equal chunks; {}", batch.rows, chunks,
                chunks > batch.rows ? fmt::format("the most is {}", fewer)
                                    : fmt::format("the nearest counts are {} and {}", fewer, more));
  }
  if (chunks == 1) return {to_thd(batch, options)};
  check_metadata(batch, options);
  check_arrays(batch);
  const int64_t rows = batch.rows / chunks;
  std::vector<ThdBatch> parts;
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    parts.push_back(convert(slice_rows(batch, chunk * rows, rows), options, chunk * rows));
  return parts;
}

ChunkBounds stack_chunk_bounds(std::span<const ThdBatch> chunks, int32_t sentinel) {
  std::vector<std::span<const int32_t>> real, padded;
  std::vector<int32_t> widest;
  bool any_padded = false;
  for (const ThdBatch& chunk : chunks) {
    GYRE_CHECK(chunk.cu_seqlens && chunk.max_seqlen, "a chunk without boundaries");
    real.push_back(chunk.bounds().real);
    padded.push_back(chunk.bounds().padded);
    widest.push_back(*chunk.max_seqlen);
    any_padded = any_padded || chunk.cu_seqlens_padded.has_value();
  }
  ChunkBounds bounds{stack(real, sentinel), std::nullopt, std::move(widest)};
  if (any_padded) bounds.cu_seqlens_padded = stack(padded, sentinel);
  return bounds;
}

std::span<const int32_t> strip_sentinels(std::span<const int32_t> row, int32_t sentinel) {
  while (!row.empty() && row.back() == sentinel) row = row.first(row.size() - 1);
  return row;
}

int64_t count_real_tokens(std::span<const uint8_t> padding_mask) {
  return std::count(padding_mask.begin(), padding_mask.end(), uint8_t{0});
}

int64_t count_supervised_tokens(std::span<const int64_t> labels) {
  return std::ssize(labels) - std::count(labels.begin(), labels.end(), ignored_label);
}

}  // namespace gyre
