#pragma once
// Packed streams out of the batches that gyre-pack reads: rectangular rows of segments, and rows of
// text with audio.

#include <string>

#include "io/batch_file.hpp"
#include "packing/salm.hpp"
#include "packing/thd.hpp"
#include "report/packing_report.hpp"

namespace gyre {

/// Streams, complete on every rank, and what was found on the way.
struct ConvertedBatch {
  PackedHeader header;  ///< one bin a stream; segments are numbered as documents
  PackedSlots slots;
  PackingRow row;
  std::string notes;  ///< "#" lines
};

/// The rows as `chunks` streams. Throws a usage error that names row and segment as to_thd does,
/// and when an id or label does not fit the vocabulary.
ConvertedBatch convert(const BshdArrays& batch, int64_t chunks, const ThdOptions& options);

/// Encodes the audio, which the ranks of `world` share, and packs rows and frames into one stream.
/// Encodings are gathered in both ways (padded and ragged); `checks` get that both are those of a
/// rank alone, and the notes say what each moved. Collective.
ConvertedBatch convert(const SalmArrays& batch, const SalmOptions& options, Communicator& world,
                       Verification& checks);

}  // namespace gyre
