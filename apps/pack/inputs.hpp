#pragma once
// Conversion of the batches that gyre-pack reads (rectangular rows of segments, rows of text with
// audio) to packed streams.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "apps/pack/report.hpp"
#include "harness/backend.hpp"
#include "io/schemas/array_file.hpp"
#include "io/schemas/batch_file.hpp"
#include "packing/salm.hpp"
#include "packing/thd.hpp"

namespace gyre {

/// Streams, complete on every rank, and notes on their conversion.
struct ConvertedBatch {
  PackedHeader header;  ///< one bin per stream; segments are numbered as documents
  PackedSlots slots;
  /// The slots with embeddings that the backend gathered from rows of text and audio;
  /// none for batches without audio.
  std::optional<PackedSlots> gathered_slots;
  std::optional<ArrayFile> encoder;  ///< gyre/encoder, complete on rank 0, if wanted
  PackingResult row;
  std::string notes;  ///< "#" lines
};

/// Converts the rows of `file` to `chunks` streams whose segments are multiples of `slot_multiple`
/// slots. `tail`: own-segment, keep or absorb (see packing/thd.hpp). Rows without tables are
/// documents (add_tables_of_rows). Throws a usage error that names file, row and segment as to_thd
/// does. Every rank converts, and measures, alone. Collective.
ConvertedBatch convert(const std::string& file, const BshdArrays& batch, int64_t chunks,
                       int64_t slot_multiple, const std::string& tail, Communicator& world,
                       const RepeatOptions& repeats = {1});

/// Checks that extras of slots equal those of the rows, if the batch has extras, and positions of
/// several axes those of the rows. If it has no tables of lengths, checks the lengths of documents
/// by their ids.
void check_converted(const BshdArrays& batch, const ConvertedBatch& converted,
                     Verification& checks);

/// How text with audio is packed.
struct SalmJob {
  int cp = 1, tp = 1;
  TpRounding rounding = TpRounding::per_rank;
  RepeatOptions repeats = {1};
  bool keep_encoder = false;  ///< whether ConvertedBatch::encoder is wanted
};

/// Encodes the audio of `file` on the ranks of `world` together, and packs rows and frames into one
/// stream. Encodings are gathered both padded and ragged; the notes give the bytes of each. Adds to
/// `checks` that both equal the encodings of a single rank, that their gradients reach the encoder,
/// that all bytes are those of the closed form, and that the ranks' shards are those of the stream.
/// Every rank packs, and measures, alone. With a backend on a GPU, encodings travel over its
/// communicator, and its device gathers text and frames into gathered_slots. Collective.
ConvertedBatch convert(const std::string& file, const SalmArrays& batch, const SalmJob& job,
                       Communicator& world, Verification& checks, Backend* backend = nullptr);

/// Bytes of the arrays of gyre/encoder on so many ranks.
double encoder_bytes(const SalmArrays& batch, int ranks);

// Both conversions use the functions below.

template <class T, class U>
void append(std::vector<T>& all, const std::vector<U>& part) {
  all.insert(all.end(), part.begin(), part.end());
}

/// Converts ids, labels or positions to the type of packed files. Readers have checked their range.
std::vector<int32_t> narrow(const std::vector<int64_t>& values);
/// Appends one stream as a bin and continues the numbering of segments. Slots after the last
/// segment become a segment without tokens, so that every slot is in a segment.
void add_stream(ConvertedBatch& batch, std::vector<int32_t> real, std::vector<int32_t> padded,
                int64_t slots);
/// Runs `work` on every rank. Its errors name `file`.
void run_on_file(Communicator& world, const std::string& file, const std::function<void()>& work);

}  // namespace gyre
