#pragma once
// Moving token-aligned arrays between a stream and its shards, in memory.
//
//     local[t] = stream[index[t]]           shard_rows
//     stream[index[t]] = local[t]           unshard_rows
//
// over the runs of the layout rather than an index list: a run of slots is one memcpy. Rows are
// [row] elements of any trivially copyable type: ids, labels, positions, masks, embeddings. (A cast
// to integers on the way would ruin embeddings, so there is none.)
//
// A process that reads or writes the shards of all ranks moves them in one pass:
//
//     for each run of any rank, in stream order:           rank 0 0 1 2 3 3 2 1 0 ...
//         copy its slots, the next of the stream, to, or from, the next of its rank's shard
//
// Then one side is one sequential stream, the other is cp of them, and each cache line is accessed
// once. Rank by rank, short runs would access a part of every page, cp times.
//
// The limit is memory: a call moves each byte in and out, and reads 32 bytes of metadata for each
// run. A run takes 5 ns at least, so that runs of some cache lines reach memcpy's rate, and ids of
// 64-token documents over 8 ranks (16 bytes a run) a quarter of it. Results are written past the
// caches (non-temporal stores) where runs are long enough, which saves reading the lines that are
// overwritten and can be faster than memcpy. Streams below 16 MiB are in the caches, where moving
// them rank by rank is faster. Numbers are in
// bench/sharding.cpp.

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "sharding/layout.hpp"

namespace gyre {
namespace detail {
void shard_bytes(const Layout& layout, int rank, std::span<const std::byte> stream,
                 std::span<const std::byte> fill, std::span<std::byte> local, int64_t row_bytes);
void unshard_bytes(const Layout& layout, int rank, std::span<const std::byte> local,
                   std::span<std::byte> stream, int64_t row_bytes);
/// Streams of fewer bytes are in the caches with their shards: rank by rank is faster there.
inline constexpr int64_t cached_stream_bytes = 16 << 20;
void shard_all_bytes(const Layout& layout, std::span<const std::byte> stream,
                     std::span<const std::byte> fill, std::span<std::byte> shards,
                     int64_t row_bytes, int64_t cached_bytes = cached_stream_bytes);
/// Shards of consecutive ranks begin `step` bytes apart, at least the bytes of one.
void unshard_all_bytes(const Layout& layout, std::span<const std::byte> shards, int64_t step,
                       std::span<std::byte> stream, int64_t row_bytes,
                       int64_t cached_bytes = cached_stream_bytes);
}  // namespace detail

/// local [slots, row] <- the rank's slots of stream [stream_slots or padded_slots, row]; slots past
/// the end of the stream become `fill`. Throws a usage error that names the lengths when the stream
/// is neither long, or `local` is not [slots, row], or row < 1.
template <class T>
void shard_rows(const Layout& layout, int rank, std::span<const T> stream, std::span<T> local,
                int64_t row = 1, T fill = T{}) {
  static_assert(std::is_trivially_copyable_v<T>);
  detail::shard_bytes(layout, rank, std::as_bytes(stream),
                      std::as_bytes(std::span<const T>(&fill, 1)), std::as_writable_bytes(local),
                      row * static_cast<int64_t>(sizeof(T)));
}

/// The rank's slots of stream [stream_slots or padded_slots, row] <- local [slots, row]; others are
/// left alone, and slots past the end of the stream are dropped. Same errors. All ranks' calls, or
/// one for each block of an all-gather in rank order, restore the stream.
template <class T>
void unshard_rows(const Layout& layout, int rank, std::span<const T> local, std::span<T> stream,
                  int64_t row = 1) {
  static_assert(std::is_trivially_copyable_v<T>);
  detail::unshard_bytes(layout, rank, std::as_bytes(local), std::as_writable_bytes(stream),
                        row * static_cast<int64_t>(sizeof(T)));
}

/// shards [cp, slots, row] <- stream [stream_slots or padded_slots, row]: shard_rows for every rank
/// in one pass over the stream. Throws a usage error that names the lengths when the stream is
/// neither long, or `shards` is not [cp, slots, row], or row < 1.
template <class T>
void shard_all_rows(const Layout& layout, std::span<const T> stream, std::span<T> shards,
                    int64_t row = 1, T fill = T{}) {
  static_assert(std::is_trivially_copyable_v<T>);
  detail::shard_all_bytes(layout, std::as_bytes(stream),
                          std::as_bytes(std::span<const T>(&fill, 1)),
                          std::as_writable_bytes(shards), row * static_cast<int64_t>(sizeof(T)));
}

/// stream [stream_slots or padded_slots, row] <- shards [cp, slots, row]: unshard_rows for every
/// rank in one pass over the stream, all of which is written; slots past its end are dropped. Same
/// errors.
template <class T>
void unshard_all_rows(const Layout& layout, std::span<const T> shards, std::span<T> stream,
                      int64_t row = 1) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto row_bytes = row * static_cast<int64_t>(sizeof(T));
  const int64_t slots = layout.slots_of_rank();
  detail::unshard_all_bytes(layout, std::as_bytes(shards), slots * row_bytes,
                            std::as_writable_bytes(stream), row_bytes);
}

/// The twins by index list, row by row.
void shard_rows_reference(const Layout& layout, int rank, std::span<const double> stream,
                          std::span<double> local, int64_t row, double fill);
void unshard_rows_reference(const Layout& layout, int rank, std::span<const double> local,
                            std::span<double> stream, int64_t row);

}  // namespace gyre
