#pragma once
// Converts a rectangular batch of packed rows (BSHD) into one stream of slots (THD).
//
//     2 rows of 6 slots, sentinel _      row 0  a a a . b b      row 1  c c c c c c
//     seq_lens          [[3 2] [6 _]]    real tokens of each segment; they come first in its slots
//     seq_lens_padded   [[4 2] [6 _]]    slots of each segment; they fill the row
//
//     stream            a a a . b b c c c c c c      rows one after the other, no token moves
//     cu_seqlens        0 3 5 11                     prefix sums of the real lengths
//     cu_seqlens_padded 0 4 6 12                     prefix sums of the slots: where segments lie
//     max_seqlen        6
//     padding_mask      . . . P . . . . . . . .
//
//     segments     cells of both tables that are not the sentinel, row by row
//     cu, cup      prefix sums of their real lengths and of their slots
//     tail         see Tail: cu and cup may change, the mask does not
//     max_seqlen   widest segment of the final cu
//     mask         1 where offset in segment >= real length, or after the last segment
//
// Follows NeMo Automodel's process_input_for_thd, but checks what that assumes of the tables: a row
// that is not filled would shift every later boundary.

#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "core/extra.hpp"
#include "core/label.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// A cell of a length table that holds no segment.
inline constexpr int64_t length_sentinel = -1000;

/// Lengths of the segments of each row, row-major; a cell equal to the sentinel holds none.
struct LengthTable {
  int64_t rows = 0;
  int64_t columns = 0;         ///< most segments of a row
  std::vector<int64_t> cells;  ///< [rows, columns]
  int64_t at(int64_t row, int64_t column) const { return cells[row * columns + column]; }
};

using TokenIds = std::vector<int64_t>;  ///< [slots]
/// Activations of an earlier pipeline stage, or text and audio embeddings; hidden may be 1.
struct TokenEmbeddings {
  int64_t hidden = 1;
  std::vector<float> values;  ///< [slots, hidden]
};
using TokenInputs = std::variant<TokenIds, TokenEmbeddings>;

/// Position ids: one axis, or several for multi-axis rotary embeddings.
struct PositionIds {
  int64_t axes = 1;
  std::vector<int64_t> values;  ///< [axes, slots]
};

/// A batch of `rows` rows of `slots` slots. Absent tables or positions are nullopt.
struct BshdBatch {
  int64_t rows = 0;
  int64_t slots = 0;
  TokenInputs inputs;                    ///< [rows, slots] or [rows, slots, hidden]
  std::vector<int64_t> labels;           ///< [rows, slots], shifted already
  std::optional<PositionIds> positions;  ///< [rows, slots] or [axes, rows, slots]
  std::optional<LengthTable> seq_lens;
  std::optional<LengthTable> seq_lens_padded;
  Extras extras;
};

/// Treatment of padding after the last real token of a row. One row, 5 real tokens in 16 slots:
///
///                   cu_seqlens  cu_seqlens_padded
///     absorb        0 16        -                   the last segment takes it as real tokens
///     own_segment   0 5 5       0 8 16              (slot_multiple 4) a segment of no tokens
///     keep          0 5         0 16                as declared
enum class Tail {
  /// As in NeMo Automodel: if the tables differ only at the end of the whole stream, cu_seqlens
  /// ends at the last slot and cu_seqlens_padded is dropped, which avoids the slower kernel path
  /// for padding between segments. Harmless for causal attention on one rank. cu_seqlens then
  /// counts padding as real tokens: count tokens by the mask or the labels.
  absorb,
  /// The last segment of each row keeps round_up(real, slot_multiple) slots; the rest of the row is
  /// a segment of real length 0, as are slots after the last boundary. Under context parallelism
  /// this keeps the chunks of the last segment small: real lengths 16 16 5 in 16 16 96 slots over 4
  /// ranks give 13 8 8 8 real tokens per rank if kept or absorbed, but 9 9 9 10 if split at 8.
  own_segment,
  keep,
};

struct ThdOptions {
  int64_t sentinel = length_sentinel;
  int64_t pad_id = 0;         ///< read only where seq_lens is absent
  Tail tail = Tail::absorb;   ///< without seq_lens_padded, absorb is the same as keep
  int64_t slot_multiple = 1;  ///< must divide every slot length: 2·cp under DualChunkSwap
  /// Accept a last row whose segments end before the row does; other rows must be full.
  bool allow_undeclared_tail = false;
};

/// A packed stream of `slots` slots.
struct ThdBatch {
  int64_t slots = 0;
  TokenInputs inputs;                                     ///< [slots] or [slots, hidden]
  std::vector<int64_t> labels;                            ///< [slots]
  std::optional<PositionIds> positions;                   ///< [slots] or [axes, slots]
  std::optional<std::vector<int32_t>> cu_seqlens;         ///< [N + 1]; absent without seq_lens
  std::optional<std::vector<int32_t>> cu_seqlens_padded;  ///< [N + 1]; absent if equal to
                                                          ///< cu_seqlens: no padding
  std::optional<int32_t> max_seqlen;  ///< widest segment of cu_seqlens, 0 without segments
  std::vector<uint8_t> padding_mask;  ///< [slots] 1 = padding, including absorbed slots
  bool absorbed = false;
  Extras extras;

  /// Views of real and padded boundaries. Precondition: cu_seqlens is present.
  SegmentBounds bounds() const {
    return {*cu_seqlens, cu_seqlens_padded ? *cu_seqlens_padded : *cu_seqlens};
  }
};

/// Flattens a batch by moving its arrays. Rows of sentinels only are padding and must come last;
/// their slots are a tail of the stream (see Tail; with Tail::keep they lie after the last
/// boundary). A real length of 0 is valid and repeats a boundary.
///
/// Without seq_lens (ids only) slots that hold options.pad_id are padding; they must be the end of
/// the stream. Without seq_lens_padded the real lengths are the slot lengths.
///
/// Usage errors, by row and segment (column of the table), with the nearest valid value: arrays or
/// tables of the wrong size; sentinels in one table only; not 0 <= real <= slots; slot lengths of a
/// row that do not sum to its slots or are not multiples of slot_multiple; an all-padding row
/// before one with segments; a stream longer than int32; embeddings without seq_lens;
/// seq_lens_padded without seq_lens; pad ids among content without seq_lens.
ThdBatch to_thd(BshdBatch batch, const ThdOptions& options = {});

/// Cuts the rows into `chunks` equal groups and converts each by to_thd, with its own tail. Returns
/// [chunks]. Positions (all axes) and extras (by alignment) are cut with the rows. Throws a usage
/// error that names the nearest divisors unless rows is a multiple of chunks, and the errors of
/// to_thd, with rows numbered in the whole batch.
std::vector<ThdBatch> split_into_chunks(const BshdBatch& batch, int64_t chunks,
                                        const ThdOptions& options = {});

/// Boundaries of several chunks as a rectangular table; short rows end with sentinels.
struct StackedBounds {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<int32_t> cells;  ///< [rows, columns]
  std::span<const int32_t> row(int64_t i) const {
    return std::span(cells).subspan(i * columns, columns);
  }
};

/// Metadata of the chunks, stacked along a leading axis.
struct ChunkBounds {
  StackedBounds cu_seqlens;
  std::optional<StackedBounds> cu_seqlens_padded;  ///< if any chunk has one; others give cu_seqlens
  std::vector<int32_t> max_seqlen;                 ///< [chunks]
};
/// Stacks the boundaries of chunks, all of which must have cu_seqlens.
ChunkBounds stack_chunk_bounds(std::span<const ThdBatch> chunks,
                               int32_t sentinel = static_cast<int32_t>(length_sentinel));

/// Removes the sentinels at the end of one row.
std::span<const int32_t> strip_sentinels(std::span<const int32_t> row,
                                         int32_t sentinel = static_cast<int32_t>(length_sentinel));

/// Number of slots that are not padding. Equals the end of cu_seqlens only if nothing was absorbed.
int64_t count_real_tokens(std::span<const uint8_t> padding_mask);
/// Number of labels other than ignored_label.
int64_t count_supervised_tokens(std::span<const int64_t> labels);

}  // namespace gyre
