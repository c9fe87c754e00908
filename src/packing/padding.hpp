#pragma once
// Padding of packed sequences, positions of padding, and row packing for context parallelism.
//
// Dual-chunk-swap cuts every segment into 2·cp chunks, so that its number of slots must be a
// multiple of 2·cp. Sequences 1 1 and 2 2 2, multiple 4:
//
//     slots              1 1 . . 2 2 2 .        padding has id 0 and label -100
//     cu_seqlens_padded  0 4 8
//     positions          0 1 2 3 0 1 2 3        continue through the padding of a segment
//
// Boundaries always come from cu_seqlens. They are never inferred from positions: a zero in the
// padding would begin a document.

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "packing/thd.hpp"

namespace gyre {

/// Rounds each segment length up to a multiple of `multiple`. Takes real boundaries cu [N + 1] and
/// returns padded ones [N + 1]. Throws a usage error that names the segment when cu does not start
/// at 0 or decreases, when multiple < 1, or when the result exceeds int32.
std::vector<int32_t> pad_boundaries(std::span<const int32_t> cu, int64_t multiple);

struct PaddedSequences {
  std::vector<int64_t> ids;                ///< [slots]
  std::vector<int64_t> labels;             ///< [slots]
  std::vector<int32_t> cu_seqlens_padded;  ///< [N + 1]
};

/// Pads each sequence of a packed stream without gaps (ids and labels [cu.back()]) to a multiple of
/// `multiple` slots, after TransformerEngine's pad_thd_sequences_for_cp. Throws the usage errors of
/// pad_boundaries, and one when ids or labels are not cu.back() long.
PaddedSequences pad_thd_sequences(std::span<const int64_t> ids, std::span<const int64_t> labels,
                                  std::span<const int32_t> cu, int64_t multiple, int64_t pad_id = 0,
                                  int64_t pad_label = ignored_label);

/// Positions [bounds.back()] of a stream with these slot boundaries: 0 .. slots-1 in each segment,
/// including its padding, and at most `largest` (NeMo Automodel's packer: row width - 1). Positions
/// belong to the whole stream and are sharded like tokens; computed from local indices they would
/// be wrong.
std::vector<int64_t> packed_positions(std::span<const int32_t> bounds,
                                      int64_t largest = std::numeric_limits<int64_t>::max());

/// Positions [rows, slots] of unpacked rows. Input: [rows, slots], or [1, slots] for all rows, or
/// empty for 0 .. slots-1. Packed rows must bring their own positions, or their documents would
/// silently merge. Throws a usage error for any other number of positions.
std::vector<int64_t> broadcast_positions(std::span<const int64_t> positions, int64_t rows,
                                         int64_t slots);

/// Positions of padding that is appended to a row, and who uses them.
enum class PadPositions {
  counting,   ///< continue from the last one; packers, and rows cut for model-owned attention
  zero,       ///< row zigzag in PyTorch, right-padded target contexts
  restarted,  ///< 0, 1, 2, ...; Ulysses in LightRFT
};
/// Appends positions up to `length`. Throws a usage error when there are more already.
void pad_positions(std::vector<int64_t>& positions, int64_t length, PadPositions kind);

/// Treatment of a sample that is longer than a row.
enum class OversizeSample { drop, reject };

struct RowPackOptions {
  int64_t row = 0;  ///< slots of a row; a multiple of 2·cp when cp > 1
  int cp = 1;
  OversizeSample oversize = OversizeSample::drop;
};

/// Samples of one row; the padded lengths sum to the row.
struct PackedRow {
  std::vector<int64_t> samples;          ///< input indices
  std::vector<int64_t> seq_lens;         ///< lengths of the samples
  std::vector<int64_t> seq_lens_padded;  ///< these rounded up, and the last one to the row's end
};
struct RowPacking {
  std::vector<PackedRow> rows;
  std::vector<int64_t> dropped;  ///< samples that are longer than a row
};

/// Fills rows in input order and closes a row at the first misfit, like NeMo Automodel's packer.
/// Lengths are rounded up to 2·cp (cp = 1: not rounded).
///     lengths 3 5, row 16, cp 2     seq_lens 3 5, seq_lens_padded 4 12
/// Usage errors: row < 1 or not a multiple of 2·cp, with the nearest valid values; a negative
/// length; a rounded length above the row under OversizeSample::reject; nothing packed at all.
RowPacking pack_rows(std::span<const int64_t> lengths, const RowPackOptions& options);

struct LengthTables {
  LengthTable seq_lens;
  LengthTable seq_lens_padded;
};
/// Lengths of packed rows as rectangular tables; short rows end with sentinels.
LengthTables length_tables(std::span<const PackedRow> rows, int64_t sentinel = length_sentinel);

/// How round_sequences rounds the sequences of one packed stream.
struct RoundOptions {
  int64_t multiple = 1;  ///< sequences are rounded up to it; a multiple of tp · (cp > 1 ? 2·cp : 1)
  int cp = 1;
  int tp = 1;                   ///< ranks of sequence parallelism; 1 without it
  int64_t stream_multiple = 1;  ///< the whole stream is rounded up to it
  int64_t stream_slots = 0;     ///< fixed length of the whole stream; 0: the smallest that fits
  Tail tail = Tail::own_segment;
};
struct RoundedStream {
  std::vector<int32_t> cu_seqlens;         ///< real
  std::vector<int32_t> cu_seqlens_padded;  ///< slots
  int32_t max_slots = 0;                   ///< widest slot range: max_seqlen of this layout
};

/// Lays sequences out one after the other, like NeMo-RL for Megatron-LM, but keeps the real lengths
/// beside the padded ones. Slots that the stream needs to reach its length become a segment of real
/// length 0, unless `tail` gives them to the last sequence (keep, absorb: the last boundary moves,
/// which skews the chunks of the last sequence).
///
/// Usage errors, each with the nearest valid value: a negative length; multiple, stream_multiple or
/// stream_slots not a multiple of what cp and tp need; stream_slots below what the sequences need;
/// both stream_multiple and stream_slots given; a stream longer than int32.
RoundedStream round_sequences(std::span<const int64_t> lengths, const RoundOptions& options);

}  // namespace gyre
