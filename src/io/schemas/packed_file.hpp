#pragma once
// Packed streams and their file, "gyre/packed": bins one after the other, each with its segments,
// and for every slot an id (or an embedding), a label and a position.
//
// Slot boundaries are always stored beside real lengths, so that padding is never guessed from ids
// or positions: slot k of a segment's range is padding iff k >= its real length.

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/label.hpp"
#include "io/schemas/extras_file.hpp"
#include "io/schemas/packed_bins.hpp"
#include "io/schemas/schema.hpp"

namespace gyre {

inline constexpr const char* packed_schema = "gyre/packed";
inline constexpr int64_t max_position_axes = 256;

/// The part of a stream that is the same on all ranks.
struct PackedHeader {
  PackedBins bins;
  int64_t slot_multiple = 1;  ///< divides every segment's number of slots
  int64_t documents = 0;      ///< number of documents (or trees) in bins.document
  int64_t vocab_size = 0;     ///< ids are in [0, vocab_size); labels too, or ignored_label
  int64_t hidden_size = 0;    ///< 0: ids; else embeddings of this width
  int64_t position_axes = 1;  ///< axes of a position; above 1 for multi-axis rotary embeddings
  std::string tokenizer;
  std::string algorithm;           ///< how documents were packed into bins
  std::vector<std::string> names;  ///< per document, or empty
  StoredExtras extras;             ///< PackedSlots holds the bytes of those aligned to slots
  Provenance provenance;

  int64_t bin_count() const { return std::ssize(bins.bin_offsets) - 1; }
  /// Real and slot boundaries of bin b, each from 0: [segments + 1].
  std::span<const int32_t> cu_seqlens(int64_t b) const { return bounds(bins.cu_seqlens, b); }
  std::span<const int32_t> cu_seqlens_padded(int64_t b) const {
    return bounds(bins.cu_seqlens_padded, b);
  }
  /// Number of documents; without trees every segment holds one.
  int64_t document_count() const {
    return bins.prefixes.empty() ? documents : std::ssize(bins.prefixes.documents);
  }
  /// Document, or tree, of each segment of bin b.
  std::span<const int64_t> documents_of(int64_t b) const {
    const size_t begin = bins.bin_offsets[b];
    const size_t end = bins.bin_offsets[b + 1];
    return std::span(bins.document).subspan(begin, end - begin);
  }
  /// First slot of each bin, and the number of slots at the end: [bins + 1].
  std::vector<int64_t> slot_offsets() const;

 private:
  std::span<const int32_t> bounds(const std::vector<int32_t>& all, int64_t b) const;
};

/// Bytes of consecutive slots of an extra.
struct ExtraSlots {
  int64_t item_bytes = 1;            ///< per slot
  std::vector<std::byte> bytes;      ///< [slots, item_bytes]
  std::vector<std::byte> fill = {};  ///< Extra::fill

  /// `slots` slots of padding of this extra.
  ExtraSlots padding(int64_t slots) const {
    ExtraSlots made{item_bytes, std::vector<std::byte>(slots * item_bytes), fill};
    for (size_t i = 0; i < made.bytes.size(); ++i) made.bytes[i] = padding_byte(fill, i);
    return made;
  }
};

/// Contents of consecutive slots.
struct PackedSlots {
  std::vector<int32_t> ids;        ///< [slots], or empty with embeddings
  std::vector<float> embeddings;   ///< [slots, hidden_size], or empty with ids
  std::vector<int32_t> labels;     ///< [slots] what the slot predicts; ignored_label: nothing
  std::vector<int32_t> positions;  ///< [slots, axes] position in the segment, padding included
  std::map<std::string, ExtraSlots> extras;  ///< the header's extras that are aligned to slots

  int64_t position_axes() const {
    return labels.empty() ? 1 : std::ssize(positions) / std::ssize(labels);
  }
};

/// Appends positions [slots, axes] of `slots` slots of padding. Each axis continues from the last
/// position of the segment, which begins at element `begin`, or starts at 0 if the segment is
/// empty.
void count_on(std::vector<int32_t>& positions, size_t begin, int64_t slots, int64_t axes);

/// A matrix [rows, columns] as [columns, rows]: files hold positions [axes, slots].
std::vector<int32_t> transposed(std::span<const int32_t> values, int64_t rows, int64_t columns);

/// Adds the errors in a header's tables to `errors`; of wrong bins, only the first.
void check_packed(ConfigErrors& errors, const PackedHeader& header);

/// Writes the temporary file of `output`; the caller commits it. Every rank passes consecutive
/// slots, in rank order and without gaps. Collective.
void fill_packed(OutputFile& output, const PackedHeader& header, const PackedSlots& mine);

/// Reads and checks the header on every rank. Collective.
PackedHeader read_packed_header(Communicator& comm, const std::string& path);

/// Reads and checks the slots of bins [first, last), which may differ between ranks. Collective.
PackedSlots read_packed_slots(Communicator& comm, const std::string& path,
                              const PackedHeader& header, int64_t first, int64_t last);

}  // namespace gyre
