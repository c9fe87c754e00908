#pragma once
// Shards of packed streams by context-parallel rank: file "gyre/shards". Row r of every array
// belongs to rank r and holds its parts of all bins in order.

#include "io/schemas/packed_file.hpp"

namespace gyre {

inline constexpr const char* shards_schema = "gyre/shards";

/// The part of the shards that is the same on all ranks.
struct ShardsHeader {
  std::string layout;
  int64_t cp = 0;
  int64_t hidden_size = 0;               ///< 0: ids; else embeddings of this width
  int64_t position_axes = 1;             ///< of multi-axis rotary embeddings
  std::vector<int64_t> bin_offsets;      ///< [bins + 1] in segments of the packed streams
  std::vector<int64_t> slot_offsets{0};  ///< [bins + 1] in local slots of a rank
  std::string packed_sha256;             ///< SHA-256 of the packed file, or "" if generated
  StoredExtras extras;                   ///< ShardRows holds the bytes of those aligned to slots
  Provenance provenance;
};

/// Shard of one rank. Contents as in PackedSlots; `index` is the slot of the bin's stream that each
/// local slot holds (padding of the layout: at or past the end of the stream).
struct ShardRows : PackedSlots {
  std::vector<int32_t> index;              ///< [local slots]
  std::vector<int32_t> cu_seqlens;         ///< [segments + bins] prefix sums of real local lengths
  std::vector<int32_t> cu_seqlens_padded;  ///< [segments + bins] prefix sums of local slots
};

/// Writes the temporary file of `output`; the caller commits it. This rank passes rows rank, rank +
/// size, ... of the cp rows. Collective.
void fill_shards(OutputFile& output, const ShardsHeader& header, std::span<const ShardRows> mine);

/// Reads the extras of a file onto every rank; those aligned to slots without bytes. Collective.
StoredExtras read_shard_extras(Communicator& comm, const std::string& path,
                               const ShardsHeader& header);

/// All rows, on every rank. A file with another header, or with datasets of other types or shapes
/// than follow from it, is a usage error that lists all problems. Collective.
std::vector<ShardRows> read_shard_rows(Communicator& comm, const std::string& path,
                                       const ShardsHeader& header);

}  // namespace gyre
