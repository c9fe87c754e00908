#pragma once
// Tables of packed bins, which say which documents each bin holds. They are the group /packed of
// results files and packed streams.

#include <cstdint>
#include <optional>
#include <vector>

#include "io/schemas/prefix_tables.hpp"
#include "io/schemas/schema.hpp"

namespace gyre {

/// The HDF5 group of packed streams.
inline constexpr const char* packed_group = "/packed";

/// Concatenated tables of all bins. Bin b, with s segments, has s + 1 cu_seqlens, which start at 0.
/// They are at index bin_offsets[b] + b and after.
struct PackedBins {
  int64_t bin_capacity = 0;
  std::vector<int64_t> bin_offsets{0};     ///< [bins + 1], in segments
  std::vector<int64_t> document;           ///< [segments] document, or tree, of each segment
  std::vector<int32_t> cu_seqlens;         ///< [segments + bins], real lengths
  std::vector<int32_t> cu_seqlens_padded;  ///< [segments + bins], slots included
  PrefixTables prefixes;                   ///< for documents stored as trees

  /// Appends a bin: document, real boundaries and slot boundaries of its segments.
  void add_bin(std::span<const int64_t> documents, std::span<const int32_t> real,
               std::span<const int32_t> padded);
};

/// Creates the group and writes the tables. One process.
void write_packed_bins(h5::File& file, const PackedBins& bins);

/// Datasets of the tables. All but `prefixes` are set unless the reader found errors.
struct PackedBinParts {
  std::optional<h5::Dataset> bin_offsets, document, cu_seqlens, cu_seqlens_padded;
  PrefixParts prefixes;
};
/// Finds the tables and checks their shapes. No communication.
PackedBinParts open_packed_bins(SchemaReader& reader, PackedBins& bins);
/// Reads the tables. Collective.
void read_packed_bins(const PackedBinParts& parts, PackedBins& bins);

}  // namespace gyre
