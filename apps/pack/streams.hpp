#pragma once
// Changes the lengths of packed streams: rounds them for a trainer, or pads them for another number
// of context-parallel ranks.

#include "apps/common/packed_streams.hpp"
#include "packing/padding.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Requirements on the lengths of whole streams.
struct StreamRounding {
  int64_t multiple = 1;  ///< divisor of every stream's slots
  int64_t slots = 0;     ///< slots of every stream; 0: as many as it needs
  bool wanted() const { return multiple > 1 || slots > 0; }
};

/// Lengthens every stream as NeMo-RL packs for Megatron-LM (round_sequences). With Tail::keep, the
/// new slots join the last segment. With Tail::own_segment, they become a segment without tokens,
/// of a document that is added after the `documents` of the header. Adds to `checks` that documents
/// keep their places and that streams have the requested lengths. Throws the usage errors of
/// round_sequences, with the number of the stream.
void round_streams(PackedHeader& header, const RoundOptions& options, Verification& checks);

/// Streams that are padded for another multiple.
struct RepaddedStreams {
  PackedHeader header;
  PackedSlots slots;
};
/// Replaces the padding of the streams: every segment, even one without tokens, gets a multiple of
/// `multiple` slots (pad_thd_sequences). Extras of slots move with their tokens. Adds to `checks`
/// that each segment keeps its content, with padding after it. Throws a usage error for streams of
/// embeddings.
RepaddedStreams repad_streams(const PackedHeader& header, const PackedSlots& slots,
                              int64_t multiple, Verification& checks);

}  // namespace gyre
