#pragma once
// Moving token-aligned arrays between a stream and its shards, in memory.
//
//     local[t] = stream[index[t]]           shard_rows
//     stream[index[t]] = local[t]           unshard_rows
//
// over the pieces of the layout rather than an index list: a run of slots is one memcpy. Rows are
// [row] elements of any trivially copyable type: ids, labels, positions, masks, embeddings. (A cast
// to integers on the way would ruin embeddings, so there is none.)

#include <span>

#include "sharding/layout.hpp"

namespace gyre {
namespace detail {
void shard_bytes(const Layout& layout, int rank, std::span<const std::byte> stream,
                 std::span<const std::byte> fill, std::span<std::byte> local, int64_t row_bytes);
void unshard_bytes(const Layout& layout, int rank, std::span<const std::byte> local,
                   std::span<std::byte> stream, int64_t row_bytes);
}  // namespace detail

/// local [slots, row] <- the rank's slots of stream [stream_slots or padded_slots, row]; slots past
/// the end of the stream become `fill`. Throws a usage error that names the lengths when the stream
/// is neither long, or `local` is not [slots, row].
template <class T>
void shard_rows(const Layout& layout, int rank, std::span<const T> stream, std::span<T> local,
                int64_t row = 1, T fill = T{}) {
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
  detail::unshard_bytes(layout, rank, std::as_bytes(local), std::as_writable_bytes(stream),
                        row * static_cast<int64_t>(sizeof(T)));
}

/// The twins by index list, row by row.
void shard_rows_reference(const Layout& layout, int rank, std::span<const double> stream,
                          std::span<double> local, int64_t row, double fill);
void unshard_rows_reference(const Layout& layout, int rank, std::span<const double> local,
                            std::span<double> stream, int64_t row);

}  // namespace gyre
