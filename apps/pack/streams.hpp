#pragma once
// Streams that are packed already, given other lengths: rounded to what a trainer wants, or padded
// for another number of context-parallel ranks.

#include "apps/common/packed_streams.hpp"
#include "packing/padding.hpp"
#include "report/verify.hpp"

namespace gyre {

/// Lengths of whole streams, beside the multiple of their segments.
struct StreamRounding {
  int64_t multiple = 1;  ///< of every stream
  int64_t slots = 0;     ///< of every stream; 0: as many as it needs
  bool wanted() const { return multiple > 1 || slots > 0; }
};

/// Lengthens every stream as NeMo-RL packs for Megatron-LM (round_sequences). With Tail::keep its
/// last segment takes the slots; with Tail::own_segment they become a segment without tokens, of a
/// document that is added behind the `documents` of the header. Adds to `checks` that documents
/// stay where they are, and that streams are as long as asked for. Throws the usage errors of
/// round_sequences, with the number of the stream.
void round_streams(PackedHeader& header, const RoundOptions& options, Verification& checks);

/// What `padded` slots of a file become for another multiple.
struct RepaddedStreams {
  PackedHeader header;
  PackedSlots slots;
};
/// The streams without their padding, every segment in a multiple of `multiple` slots
/// (pad_thd_sequences), segments without tokens included; extras of slots move with their tokens.
/// Adds to `checks` that each segment holds what it held, and padding behind it. Throws a usage
/// error for streams of embeddings.
RepaddedStreams repad_streams(const PackedHeader& header, const PackedSlots& slots,
                              int64_t multiple, Verification& checks);

}  // namespace gyre
