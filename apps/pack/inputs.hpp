#pragma once
// Conversion of the batches that gyre-pack reads (rectangular rows of segments, rows of text with
// audio) to packed streams.

#include <optional>
#include <string>

#include "apps/pack/report.hpp"
#include "harness/backend.hpp"
#include "io/batch_file.hpp"
#include "packing/salm.hpp"
#include "packing/thd.hpp"

namespace gyre {

/// Streams, complete on every rank, and notes on their conversion.
struct ConvertedBatch {
  PackedHeader header;  ///< one bin per stream; segments are numbered as documents
  PackedSlots slots;
  /// The slots with embeddings that the backend's slot packer gathered from rows of text and audio;
  /// none for batches without audio.
  std::optional<PackedSlots> gathered_slots;
  PackingResult row;
  std::string notes;  ///< "#" lines
};

/// Converts the rows of `file` to `chunks` streams whose segments are multiples of `slot_multiple`
/// slots. `tail`: own-segment, keep or absorb (see packing/thd.hpp). Rows without tables are
/// documents (add_tables_of_rows). Throws a usage error that names file, row and segment as to_thd
/// does. Collective.
ConvertedBatch convert(const std::string& file, const BshdArrays& batch, int64_t chunks,
                       int64_t slot_multiple, const std::string& tail, Communicator& world);

/// Checks that extras of slots equal those of the rows, if the batch has extras, and positions of
/// several axes those of the rows. If it has no tables of lengths, checks the lengths of documents
/// by their ids.
void check_converted(const BshdArrays& batch, const ConvertedBatch& converted,
                     Verification& checks);

/// Encodes the audio of `file` on the ranks of `world` together, and packs rows and frames into one
/// stream for cp and tp. Encodings are gathered both padded and ragged; the notes give the bytes of
/// each. Adds to `checks` that both equal the encodings of a single rank, that their gradients
/// reach the encoder, and that the ranks' shards are those of the stream. With a backend on a GPU,
/// encodings travel over its communicator, and its device gathers text and frames into
/// gathered_slots. Collective.
ConvertedBatch convert(const std::string& file, const SalmArrays& batch, int cp, int tp,
                       Communicator& world, Verification& checks, Backend* backend = nullptr);

}  // namespace gyre
