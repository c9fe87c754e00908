#pragma once
// Conversion of documents, real or synthetic, to the slots of packed streams and back.

#include <functional>

#include "io/outputs.hpp"
#include "io/schemas/documents.hpp"
#include "io/schemas/packed_file.hpp"
#include "packing/packing.hpp"
#include "packing/prefix_forest.hpp"
#include "packing/slot_packer.hpp"

namespace gyre {

/// Returns token `position` of document `document`.
using TokenSource = std::function<int32_t(int64_t document, int64_t position)>;
TokenSource tokens_of(const Documents& documents);
/// A source whose documents are the streams of the trees. Both arguments must outlive it.
TokenSource tokens_of(const PrefixForest& forest, const Documents& documents);
/// Vocabulary size of synthetic tokens.
inline constexpr int64_t synthetic_vocab = 32000;
/// Synthetic tokens: a hash of document, position and seed in [0, vocab_size).
TokenSource synthetic_tokens(uint64_t seed, int64_t vocab_size);

/// Documents of synthetic tokens with lengths from `spec` (packing/lengths.hpp). Throws the usage
/// errors of `spec`, and that of check_slots_fit.
Documents generate_documents(const std::string& spec, int64_t vocab_size,
                             const std::string& tokenizer, int64_t memory_bytes);

/// Stores the tables of `bins` in a header. Does not change its other fields.
void set_bins(PackedHeader& header, std::span<const PackedBatch> bins, int64_t capacity,
              int64_t slot_multiple);

/// The slots of bins [first, last), filled where the stream is or on the host. Padding has id 0.
/// The label is the next id of the document, or ignored_label for the last token and for padding.
/// Positions continue through a segment's padding. In trees, rows at which documents diverge have
/// no label, and positions are those in the documents. Precondition: a document is in one segment.
PackedSlots fill_slots(const PackedHeader& header, int64_t first, int64_t last,
                       const TokenSource& tokens, Stream& stream);
PackedSlots fill_slots(const PackedHeader& header, int64_t first, int64_t last,
                       const TokenSource& tokens);

/// Throws a usage error if `slots` slots, made of documents of --gen, do not fit `memory_bytes` (0:
/// unknown).
void check_slots_fit(int64_t slots, int64_t memory_bytes);

/// Makes streams of synthetic documents with lengths from `spec` (packing/lengths.hpp). The named
/// packer, with the seed of the lengths, packs them into bins as `options` say; segments are
/// multiples of `multiple` slots. Fills `slots` unless it is null. Returns the spec and packer that
/// reproduce the streams. Throws the usage errors of check_slots_fit and of the packer.
std::string generate_streams(const std::string& spec, const std::string& packer, BinOptions options,
                             int64_t multiple, int64_t memory_bytes, PackedHeader& header,
                             PackedSlots* slots);

/// The documents in the slots of all bins, in the order of their numbers. Throws a usage error if a
/// document is missing or in two segments, or if the slots hold embeddings.
Documents unpack(const PackedHeader& header, const PackedSlots& slots);

/// Reads packed streams and writes their documents to `to`, one of the `outputs`. Returns a "#"
/// line with their number. Collective.
std::string unpack_file(Communicator& comm, const std::string& from, const std::string& to,
                        const Provenance& provenance, Outputs& outputs);

/// First bin of each part when bins are cut into `parts` runs of about equally many slots:
/// [parts + 1].
std::vector<int64_t> split_bins(const PackedHeader& header, int parts);

}  // namespace gyre
