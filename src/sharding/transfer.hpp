#pragma once
// Copies of token-aligned arrays between a stream and its shards, in memory.
//
//     local[t] = stream[index[t]]           shard_rows
//     stream[index[t]] = local[t]           unshard_rows
//
// The copies follow the runs of the layout instead of an index list: a run of slots is one memcpy.
// Rows are [row] elements of any trivially copyable type: ids, labels, positions, masks,
// embeddings. Elements are never cast, since a cast to integers would ruin embeddings.
//
// A process that reads or writes the shards of all ranks moves them in one pass over the stream:
//
//     for each run of any rank, in stream order:           (ranks 0 1 2 3 3 2 1 0 0 1 ...)
//         copy its slots between the stream and the rank's shard; both advance sequentially
//
// One side is then one sequential stream and the other is cp of them, and each cache line is
// accessed once. Rank by rank, short runs would access a part of every page cp times.
//
// Memory bandwidth is the limit: a call reads and writes each byte once, and reads 32 bytes of
// metadata per run. A run takes at least 5 ns: runs of several cache lines reach memcpy's rate; ids
// of 64-token documents over 8 ranks (16 bytes a run) reach a quarter of it. Results are written by
// non-temporal stores where runs are long enough, which avoids reading the lines that are
// overwritten and can be faster than memcpy. Streams below 16 MiB are in the caches, where moving
// rank by rank is faster. See bench/sharding.cpp for numbers.

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
/// Smaller streams and their shards fit in the caches; moving rank by rank is then faster.
inline constexpr int64_t cached_stream_bytes = 16 << 20;
void shard_all_bytes(const Layout& layout, std::span<const std::byte> stream,
                     std::span<const std::byte> fill, std::span<std::byte> shards,
                     int64_t row_bytes, int64_t cached_bytes = cached_stream_bytes);
/// Shards of consecutive ranks begin `step` bytes apart; step is at least the size of one shard.
void unshard_all_bytes(const Layout& layout, std::span<const std::byte> shards, int64_t step,
                       std::span<std::byte> stream, int64_t row_bytes,
                       int64_t cached_bytes = cached_stream_bytes);
}  // namespace detail

/// Copies the rank's slots of stream [stream_slots or padded_slots, row] into local [slots, row];
/// slots past the end of the stream become `fill`. Throws a usage error that names the lengths when
/// either array has another shape, or row < 1.
template <class T>
void shard_rows(const Layout& layout, int rank, std::span<const T> stream, std::span<T> local,
                int64_t row = 1, T fill = T{}) {
  static_assert(std::is_trivially_copyable_v<T>);
  detail::shard_bytes(layout, rank, std::as_bytes(stream),
                      std::as_bytes(std::span<const T>(&fill, 1)), std::as_writable_bytes(local),
                      row * sizeof(T));
}

/// Copies local [slots, row] into the rank's slots of stream [stream_slots or padded_slots, row].
/// Other slots keep their value; slots past the end are dropped. Throws as shard_rows does. Calls
/// for all ranks, or for each block of an all-gather in rank order, restore the stream.
template <class T>
void unshard_rows(const Layout& layout, int rank, std::span<const T> local, std::span<T> stream,
                  int64_t row = 1) {
  static_assert(std::is_trivially_copyable_v<T>);
  detail::unshard_bytes(layout, rank, std::as_bytes(local), std::as_writable_bytes(stream),
                        row * sizeof(T));
}

/// Copies stream [stream_slots or padded_slots, row] into shards [cp, slots, row]: shard_rows for
/// every rank in one pass. Throws a usage error that names the lengths when either array has
/// another shape, or row < 1.
template <class T>
void shard_all_rows(const Layout& layout, std::span<const T> stream, std::span<T> shards,
                    int64_t row = 1, T fill = T{}) {
  static_assert(std::is_trivially_copyable_v<T>);
  detail::shard_all_bytes(layout, std::as_bytes(stream),
                          std::as_bytes(std::span<const T>(&fill, 1)),
                          std::as_writable_bytes(shards), row * sizeof(T));
}

/// Copies shards [cp, slots, row] into stream [stream_slots or padded_slots, row]: unshard_rows for
/// every rank in one pass, which writes the whole stream; slots past its end are dropped. Throws as
/// shard_all_rows does.
template <class T>
void unshard_all_rows(const Layout& layout, std::span<const T> shards, std::span<T> stream,
                      int64_t row = 1) {
  static_assert(std::is_trivially_copyable_v<T>);
  const int64_t row_bytes = row * sizeof(T);
  const int64_t slots = layout.slots_of_rank();
  detail::unshard_all_bytes(layout, std::as_bytes(shards), slots * row_bytes,
                            std::as_writable_bytes(stream), row_bytes);
}

/// Reference implementations by index list, row by row.
void shard_rows_reference(const Layout& layout, int rank, std::span<const double> stream,
                          std::span<double> local, int64_t row, double fill);
void unshard_rows_reference(const Layout& layout, int rank, std::span<const double> local,
                            std::span<double> stream, int64_t row);

}  // namespace gyre
