#pragma once
// Padding of packed sequences, positions of padding, and rows packed for context parallelism.
//
// Dual-chunk-swap cuts every segment into 2·cp chunks, so that each must lie in a multiple of 2·cp
// slots. Sequences 1 1 and 2 2 2, multiple 4:
//
//     slots              1 1 . . 2 2 2 .        ids 0 and labels -100 where there is padding
//     cu_seqlens_padded  0 4 8
//     positions          0 1 2 3 0 1 2 3        padding of a segment counts on
//
// Boundaries are always given by cu_seqlens. They are never inferred from positions: a zero in the
// padding would begin a document.

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "packing/thd.hpp"

namespace gyre {

/// Each slot length rounded up to `multiple`: [N + 1] from real boundaries cu [N + 1]. Empty and
/// aligned segments stay as they are. Throws a usage error that names the segment when cu does not
/// start at 0 or decreases, when multiple < 1, or when the result exceeds int32.
std::vector<int32_t> pad_boundaries(std::span<const int32_t> cu, int64_t multiple);

struct PaddedSequences {
  std::vector<int64_t> ids;                ///< [slots]
  std::vector<int64_t> labels;             ///< [slots]
  std::vector<int32_t> cu_seqlens_padded;  ///< [N + 1]
};

/// Moves each sequence of a packed stream without gaps, ids and labels [cu.back()], to slots that
/// are a multiple of `multiple`; after TransformerEngine's pad_thd_sequences_for_cp. Throws a usage
/// error as pad_boundaries, or when ids or labels are not cu.back() long.
PaddedSequences pad_thd_sequences(std::span<const int64_t> ids, std::span<const int64_t> labels,
                                  std::span<const int32_t> cu, int64_t multiple, int64_t pad_id = 0,
                                  int64_t pad_label = ignored_label);

/// Positions of a stream of these slot boundaries, [bounds.back()]: 0 .. slots-1 in each segment,
/// its own padding included, but none above `largest` (NeMo Automodel's packer: row width - 1).
/// Positions belong to the whole stream and are sharded like the tokens: recomputed from local
/// indices they would be wrong.
std::vector<int64_t> packed_positions(std::span<const int32_t> bounds,
                                      int64_t largest = std::numeric_limits<int64_t>::max());

/// Positions [rows, slots] of rows that are not packed: given for each row, or [1, slots] for all
/// of them, or not at all (empty: 0 .. slots-1). A packed row must bring its own, or its documents
/// would silently merge. Throws a usage error when there are neither slots nor rows · slots of
/// them.
std::vector<int64_t> broadcast_positions(std::span<const int64_t> positions, int64_t rows,
                                         int64_t slots);

/// Positions of padding that is appended behind a row.
enum class PadPositions {
  counting,   ///< go on from the last one; packers, and rows cut for model-owned attention
  zero,       ///< row zigzag as PyTorch shards it, right-padded target contexts
  restarted,  ///< 0, 1, 2, ...; Ulysses as LightRFT has it
};
/// Appends positions until there are `length`. Throws a usage error when there are more already.
void pad_positions(std::vector<int64_t>& positions, int64_t length, PadPositions kind);

/// What a row packer does with a sample that no row can hold.
enum class OversizeSample { drop, reject };

struct RowPackOptions {
  int64_t row = 0;  ///< slots of a row; a multiple of 2·cp when cp > 1
  int cp = 1;
  OversizeSample oversize = OversizeSample::drop;
};

/// Samples of one row; the padded lengths sum to the row.
struct PackedRow {
  std::vector<int64_t> samples;          ///< input indices
  std::vector<int64_t> seq_lens;         ///< as given
  std::vector<int64_t> seq_lens_padded;  ///< rounded up; the last one takes the rest of the row
};
struct RowPacking {
  std::vector<PackedRow> rows;
  std::vector<int64_t> dropped;  ///< samples that are longer than a row
};

/// Fills rows in order of input and closes a row at the first misfit, as NeMo Automodel's packer.
/// A sample takes its length rounded up to 2·cp (to 1 for cp = 1).
///     lengths 3 5, row 16, cp 2     seq_lens 3 5, seq_lens_padded 4 12
/// Usage errors: row < 1 or no multiple of 2·cp, with the nearest valid ones; a negative length;
/// a rounded length above the row, if oversize is to be rejected; nothing packed at all.
RowPacking pack_rows(std::span<const int64_t> lengths, const RowPackOptions& options);

struct LengthTables {
  LengthTable seq_lens;
  LengthTable seq_lens_padded;
};
/// The lengths of packed rows as rectangular tables, short rows filled with the sentinel.
LengthTables length_tables(std::span<const PackedRow> rows, int64_t sentinel = length_sentinel);

/// How sequences of one packed stream are rounded.
struct RoundOptions {
  int64_t multiple = 1;  ///< of each sequence; itself a multiple of 2·cp (cp > 1) times tp
  int cp = 1;
  int tp = 1;                   ///< ranks of sequence parallelism; 1 without it
  int64_t stream_multiple = 1;  ///< of the whole stream
  int64_t stream_slots = 0;     ///< fixed length of the whole stream; 0: as long as needed
  Tail tail = Tail::own_segment;
};
struct RoundedStream {
  std::vector<int32_t> cu_seqlens;         ///< real
  std::vector<int32_t> cu_seqlens_padded;  ///< slots
  int32_t max_slots = 0;                   ///< widest slot range: the max_seqlen of this layout
};

/// Lays sequences out one after the other, as NeMo-RL packs for Megatron-LM; but the real lengths
/// are kept beside the padded ones, and the slots that the stream needs to reach its length become
/// a segment of real length 0, unless `tail` says that the last sequence takes them (keep, absorb:
/// the last boundary moves, which skews the chunks of the last sequence).
///
/// Usage errors: a negative length; multiple not a multiple of what cp and tp need;
/// stream_multiple or stream_slots not multiples of that either; stream_slots below what the
/// sequences need; both given; a stream longer than int32. All with the nearest valid value.
RoundedStream round_sequences(std::span<const int64_t> lengths, const RoundOptions& options);

}  // namespace gyre
