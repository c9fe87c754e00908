#pragma once
// Between documents and packed streams: contents of slots from documents (or made-up ones), and
// documents back from slots.

#include <functional>

#include "io/documents.hpp"
#include "io/outputs.hpp"
#include "io/packed_file.hpp"
#include "packing/packing.hpp"
#include "packing/prefix_forest.hpp"
#include "packing/slot_packer.hpp"

namespace gyre {

/// Token `position` of document `document`.
using TokenSource = std::function<int32_t(int64_t document, int64_t position)>;
TokenSource tokens_of(const Documents& documents);
/// Tokens of the trees' streams of these documents. Both must outlive the result.
TokenSource tokens_of(const PrefixForest& forest, const Documents& documents);
/// The vocabulary of made-up tokens.
inline constexpr int64_t synthetic_vocab = 32000;
/// Tokens without documents: a hash of document, position and seed in [0, vocab_size).
TokenSource synthetic_tokens(uint64_t seed, int64_t vocab_size);

/// The tables of `bins` in a header; its other fields are left alone.
void set_bins(PackedHeader& header, std::span<const PackedBatch> bins, int64_t capacity,
              int64_t slot_multiple);

/// The slots of bins [first, last): ids of real tokens and 0 in padding, the id of the token that
/// follows in the document as label (ignored_label for the last one and for padding), positions
/// that count on through a segment's padding. In trees, rows at which documents part have no label,
/// and positions are those in the documents. Put together by `packer`, or on the host. A document
/// is in one segment.
PackedSlots fill_slots(const PackedHeader& header, int64_t first, int64_t last,
                       const TokenSource& tokens, SlotPacker& packer);
PackedSlots fill_slots(const PackedHeader& header, int64_t first, int64_t last,
                       const TokenSource& tokens);

/// Throws a usage error when so many slots, made of documents of --gen, do not fit `memory_bytes`
/// (0: unknown).
void check_slots_fit(int64_t slots, int64_t memory_bytes);

/// Streams of made-up documents: lengths from `spec` (packing/lengths.hpp), packed by the packer of
/// that name (whose seed is that of the lengths) into bins of `capacity`, segments in multiples of
/// `multiple` slots; slots too unless `slots` is null. Returns what to repeat it with. Throws the
/// usage error of check_slots_fit, besides those of the packer.
std::string generate_streams(const std::string& spec, const std::string& packer, int64_t capacity,
                             int64_t multiple, int64_t memory_bytes, PackedHeader& header,
                             PackedSlots* slots);

/// The documents in the slots of all bins, by their number. Throws a usage error when a document is
/// missing, in two segments, or when the slots hold embeddings.
Documents unpack(const PackedHeader& header, const PackedSlots& slots);

/// Reads packed streams and writes their documents to `to`, one of the `outputs`. Returns a "#"
/// line that says how many. Collective.
std::string unpack_file(Communicator& comm, const std::string& from, const std::string& to,
                        const Provenance& provenance, Outputs& outputs);

/// First bin of each part when bins are cut into `parts` runs of about equally many slots:
/// [parts + 1].
std::vector<int64_t> split_bins(const PackedHeader& header, int parts);

}  // namespace gyre
