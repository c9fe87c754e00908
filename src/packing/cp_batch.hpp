#pragma once
// Local part of a packed batch on one context-parallel rank.
//
//     every rank starts from the same full batch; nothing is communicated
//     stream = to_thd(batch)
//     index  = slots of this rank under the layout
//     each token-aligned array = its entries at `index`
//
// One row of 12 slots, real lengths 7 and 3 in 8 and 4 slots, cp = 2, dual-chunk-swap:
//
//                      whole stream                rank 0        rank 1
//     slots            0 .. 11                     0 1 6 7 8 11  2 3 4 5 9 10
//     positions        0 1 2 3 4 5 6 7 0 1 2 3     0 1 6 7 0 3   2 3 4 5 1 2
//     padding_mask     . . . . . . . P . . . P     . . . P . P   . . . . . .
//     cu_seqlens       0 7 10                      local 0 3 4   local 0 4 6
//     cu_seqlens_padded 0 8 12                     local 0 4 6   local 0 4 6
//
// Follows NeMo Automodel's make_cp_batch_for_te, with three differences: real lengths are kept
// beside slot lengths (bidirectional attention, routing and token counts need them), embeddings
// stay floats, and positions of several axes are sharded along the stream.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "packing/thd.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// Segment boundaries of the local slots, as if they were a packed stream.
struct LocalBounds {
  std::vector<int32_t> cu_seqlens;         ///< [N + 1]
  std::vector<int32_t> cu_seqlens_padded;  ///< [N + 1]
  SegmentBounds view() const { return {cu_seqlens, cu_seqlens_padded}; }
};

/// Boundaries of the local slots `index` (shard_index) of a stream. Returns nullopt unless each
/// segment is one run of local slots with its real tokens first; under dual-chunk-swap this always
/// holds. Real lengths are counted: real length / cp would be wrong on some rank unless a segment
/// is empty, half full or full. Slots past the stream, which a layout appended, lie after the last
/// boundary.
std::optional<LocalBounds> local_bounds(const SegmentBounds& bounds,
                                        std::span<const int32_t> index);

struct CpBatch {
  std::string qkv_format = "thd";
  int cp_size = 1;
  int cp_rank = 0;
  std::vector<int32_t> index;         ///< [slots] stream slot of each local slot
  TokenInputs inputs;                 ///< [slots] or [slots, hidden]
  std::vector<int64_t> labels;        ///< [slots]
  PositionIds positions;              ///< [axes, slots]
  std::vector<uint8_t> padding_mask;  ///< [slots] 1 = padding
  // Boundaries of the whole stream:
  std::vector<int32_t> cu_seqlens;         ///< [N + 1] real; pads included if `absorbed`
  std::vector<int32_t> cu_seqlens_padded;  ///< [N + 1] slots; = cu_seqlens if without padding
  int32_t max_seqlen = 0;                  ///< widest slot range of a segment
  bool absorbed = false;
  std::optional<LocalBounds> local;  ///< boundaries of the local slots; see local_bounds
  Extras extras;
  SegmentBounds bounds() const { return {cu_seqlens, cu_seqlens_padded}; }
};

/// The part of `stream` on `rank`. Precondition: `layout` is made from stream.bounds(). Slots that
/// the layout appends hold pad_id or zeros, ignored_label, position 0 and mask 1. Extras aligned to
/// slots are sharded too; "attention_mask" is dropped, since no per-slot mask can describe a shard;
/// other extras are copied. Throws a usage error when the stream lacks boundaries or positions, its
/// boundaries do not cover it, the layout has another length, or rank is out of range.
CpBatch shard_thd(const ThdBatch& stream, const Layout& layout, int rank, int64_t pad_id = 0);

struct CpOptions {
  std::string qkv_format = "thd";  ///< the only supported format
  int cp = 1;
  int rank = 0;
  std::string layout = default_layout().name;  ///< see layout_kinds; unused for cp = 1
  LayoutOptions layout_options = {};           ///< all but cp
  int64_t sentinel = length_sentinel;
  int64_t pad_id = 0;
  bool allow_undeclared_tail = false;
  std::optional<Tail> tail;  ///< unset: absorb for cp = 1, own_segment for cp > 1
};

/// Converts the batch and takes this rank's part. For cp = 1 that is the whole stream, in order.
/// Usage errors: a qkv_format other than "thd" (checked first); cp or rank out of range; seq_lens,
/// seq_lens_padded or position_ids absent, by name; under dual-chunk-swap a slot length that is not
/// a multiple of 2·cp, by row and segment; the errors of to_thd.
CpBatch make_cp_batch(BshdBatch batch, const CpOptions& options);

/// make_cp_batch for each of `chunks` equal groups of rows. Also throws as split_into_chunks does.
std::vector<CpBatch> make_cp_chunks(const BshdBatch& batch, int64_t chunks,
                                    const CpOptions& options);

/// Throws the same usage error on all ranks of the group unless their batches agree in rows, slots,
/// and digests of inputs, of labels, positions and length tables, and of extras. Sharding assumes
/// identical batches and would not notice a difference. Collective: two small all-gathers.
void agree_on_batch(Communicator& comm, const BshdBatch& batch);

/// Positions [begin, end) of a segment.
struct PositionRange {
  int64_t begin = 0;
  int64_t end = 0;
  friend bool operator==(const PositionRange&, const PositionRange&) = default;
};
/// Rows of a rotary table that a dual-chunk-swap shard reads, in local order, for a segment with
/// `local_slots` slots per rank: with c = local_slots / 2, [rank·c, (rank + 1)·c) and
/// [cp·local_slots - (rank + 1)·c, cp·local_slots - rank·c). Throws a usage error when local_slots
/// is negative or odd, or cp or rank is out of range.
std::array<PositionRange, 2> rope_slices(int64_t local_slots, int cp, int rank);

}  // namespace gyre
