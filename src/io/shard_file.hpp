#pragma once
// What each context-parallel rank holds of packed streams: file "gyre/shards". Row r of every array
// is rank r's; bins follow one another in it.

#include "io/packed_file.hpp"

namespace gyre {

inline constexpr const char* shards_schema = "gyre/shards";

/// What all ranks know alike.
struct ShardsHeader {
  std::string layout;
  int64_t cp = 0;
  int64_t hidden_size = 0;               ///< 0: ids; else embeddings of that width
  std::vector<int64_t> bin_offsets;      ///< [bins + 1] segments of the packed streams
  std::vector<int64_t> slot_offsets{0};  ///< [bins + 1] local slots of a rank
  std::string packed_sha256;             ///< of the packed file, or "" when it was generated
  StoredExtras extras;                   ///< bytes of those aligned to slots are in ShardRows
  Provenance provenance;
};

/// What one rank holds. Contents as in PackedSlots; `index` is the slot of the bin's stream behind
/// each local slot (padding of the layout: at or past the end of the stream).
struct ShardRows : PackedSlots {
  std::vector<int32_t> index;              ///< [local slots]
  std::vector<int32_t> cu_seqlens;         ///< [segments + bins] real local lengths, summed
  std::vector<int32_t> cu_seqlens_padded;  ///< [segments + bins] local slots
};

/// Writes the temporary file of `output`: rows rank, rank + size, ... of the cp rows come from this
/// rank. The caller commits. Collective.
void fill_shards(OutputFile& output, const ShardsHeader& header, std::span<const ShardRows> mine);

/// The extras of a file, those aligned to slots without bytes, on every rank. Collective.
StoredExtras read_shard_extras(Communicator& comm, const std::string& path,
                               const ShardsHeader& header);

/// All rows, on every rank. Collective; not checked beyond sizes.
std::vector<ShardRows> read_shard_rows(Communicator& comm, const std::string& path,
                                       const ShardsHeader& header);

}  // namespace gyre
