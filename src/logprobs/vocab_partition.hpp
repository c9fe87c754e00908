#pragma once
// Distribution of a vocabulary's columns over tensor-parallel ranks.
//
//     vocabulary of 259 ids in 264 columns, 3 ranks      offsets 0 88 176 264, vocab_size 259
//     rank 0 holds 0 .. 87, rank 1 88 .. 175, rank 2 176 .. 263, of which 259 .. 263 are padding
//
// Padding is excluded everywhere; it is identified by its column, not by a value in it. Shards may
// have any sizes, including 0.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "core/host_device.hpp"

namespace gyre {

/// Rank that holds an id; -1 if the id is negative or not below vocab_size.
GYRE_HOST_DEVICE inline int owner_of(const int64_t* offsets, int64_t vocab_size, int64_t id) {
  if (id < 0 || id >= vocab_size) return -1;
  int rank = 0;
  while (offsets[rank + 1] <= id) ++rank;
  return rank;
}

struct VocabPartition {
  std::vector<int64_t> offsets{0};  ///< [ranks + 1]: rank r holds columns offsets[r] to offsets[r +
                                    ///< 1] - 1
  int64_t vocab_size = 0;           ///< number of ids; later columns are padding

  int ranks() const { return static_cast<int>(offsets.size()) - 1; }
  int64_t padded() const { return offsets.back(); }
  int64_t begin(int rank) const { return offsets[rank]; }
  int64_t columns(int rank) const { return begin(rank + 1) - begin(rank); }
  /// Number of columns of the shard that are not padding, its first ones.
  int64_t valid(int rank) const;
  /// Rank that holds an id; -1 if no rank owns it: negative, or not below vocab_size.
  int owner(int64_t id) const { return owner_of(offsets.data(), vocab_size, id); }
};

/// Equal shards of `padded` columns. Throws a usage error unless `ranks` divides `padded` (it names
/// the next multiple) and 1 <= vocab_size <= padded.
VocabPartition even_partition(int64_t vocab_size, int64_t padded, int ranks);

/// Shards of these sizes, in rank order. Throws a usage error if a size is negative, or unless 1 <=
/// vocab_size <= their sum.
VocabPartition partition_of(std::span<const int64_t> columns, int64_t vocab_size);

/// Shards as even as possible, without padding: the first vocab_size % ranks are one column longer.
VocabPartition balanced_partition(int64_t vocab_size, int ranks);

/// Throws a usage error unless the partition has `ranks` ranks, its offsets start at 0 and do not
/// decrease, and 1 <= vocab_size <= padded().
void check_partition(const VocabPartition& vocab, int ranks);

/// All ranks throw the same usage error, which names `what`, the place and both values, if the
/// partition differs between ranks. It must be one for tp.size() ranks. Collective: one small
/// all-gather.
void agree_on_partition(Communicator& tp, std::string_view what, const VocabPartition& vocab);

}  // namespace gyre
