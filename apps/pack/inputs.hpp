#pragma once
// Packed streams out of the batches that gyre-pack reads: rectangular rows of segments, and rows of
// text with audio.

#include <optional>
#include <string>

#include "apps/pack/report.hpp"
#include "harness/backend.hpp"
#include "io/batch_file.hpp"
#include "packing/salm.hpp"
#include "packing/thd.hpp"

namespace gyre {

/// Streams, complete on every rank, and what was found on the way.
struct ConvertedBatch {
  PackedHeader header;  ///< one bin a stream; segments are numbered as documents
  PackedSlots slots;
  /// The same with the embeddings that the slot packer of the backend has gathered from rows of
  /// text and audio; none for batches without audio.
  std::optional<PackedSlots> gathered_slots;
  PackingResult row;
  std::string notes;  ///< "#" lines
};

/// The rows of `file` as `chunks` streams, their segments in multiples of `slot_multiple` slots;
/// `tail`: own-segment, keep or absorb (see packing/thd.hpp). Rows without tables are documents
/// (add_tables_of_rows). Throws a usage error that names file, row and segment as to_thd does.
/// Collective.
ConvertedBatch convert(const std::string& file, const BshdArrays& batch, int64_t chunks,
                       int64_t slot_multiple, const std::string& tail, Communicator& world);

/// Adds to `checks`, of a batch with extras: slot by slot they are those of the rows; of one
/// without tables: documents are as long as their ids say. Nothing of others.
void check_converted(const BshdArrays& batch, const ConvertedBatch& converted,
                     Verification& checks);

/// Encodes the audio of `file`, which the ranks of `world` share, and packs rows and frames into
/// one stream for cp and tp. Encodings are gathered in both ways (padded and ragged); `checks` get
/// that both are those of a rank alone, that gradients of them reach the encoder, and that ranks'
/// shards are those of the stream; the notes say what each way of gathering moved. With a backend
/// on a GPU they travel over its communicator, and its device gathers text and frames into
/// gathered_slots. Collective.
ConvertedBatch convert(const std::string& file, const SalmArrays& batch, int cp, int tp,
                       Communicator& world, Verification& checks, Backend* backend = nullptr);

}  // namespace gyre
