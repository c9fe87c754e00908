#include "sharding/transfer.hpp"

#include <algorithm>
#include <cstring>

#include "core/error.hpp"

namespace gyre {
namespace {

/// Rows of an array of `bytes` bytes; throws unless they are `slots` or `padded`.
int64_t check_rows(const Layout& layout, const char* what, size_t bytes, int64_t row_bytes,
                   int64_t slots, int64_t padded) {
  const auto size = static_cast<int64_t>(bytes);
  if (size % row_bytes != 0)
    throw_usage("layout {}: {} bytes of the {} are not whole rows of {} bytes", layout.name, size,
                what, row_bytes);
  const int64_t rows = size / row_bytes;
  if (rows != slots && rows != padded)
    throw_usage("layout {}: the {} has {} rows; it must have {}", layout.name, what, rows,
                slots == padded ? fmt::format("{}", slots)
                                : fmt::format("{} or, padded, {}", slots, padded));
  return rows;
}

/// Rows of the stream; throws when an array has a wrong length.
int64_t check_arrays(const Layout& layout, int rank, size_t stream_bytes, size_t local_bytes,
                     int64_t row_bytes) {
  GYRE_CHECK(rank >= 0 && rank < layout.cp(), "layout {}: rank {} of {}", layout.name, rank,
             layout.cp());
  if (row_bytes < 1) throw_usage("layout {}: a row must have at least 1 element", layout.name);
  const int64_t slots = layout.shard(rank).slots;
  check_rows(layout, "shard", local_bytes, row_bytes, slots, slots);
  return check_rows(layout, "stream", stream_bytes, row_bytes, layout.stream_slots,
                    layout.padded_slots);
}

/// Slots of a piece that lie inside a stream of `rows` rows; the others follow them.
int64_t slots_inside(const Piece& piece, int64_t rows) {
  return std::clamp<int64_t>(ceil_div(rows - piece.start.value(), piece.stride), 0, piece.length);
}

/// memcpy, without a call for a run of some 16 to 128 bytes (ids of short documents): blocks of 16,
/// the last of which overlaps. Twice as fast as calls while the stream is in a cache. Beyond the
/// caches nothing but memory counts: neither prefetching later pieces nor huge pages helped.
void copy_run(std::byte* to, const std::byte* from, int64_t bytes) {
  constexpr int64_t block = 16, longest = 128;
  if (bytes < block || bytes > longest) {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  for (int64_t at = 0; at + block <= bytes; at += block) std::memcpy(to + at, from + at, block);
  std::memcpy(to + bytes - block, from + bytes - block, block);
}

/// to[k · to_step] = from[k · from_step] for `count` rows; steps in bytes.
template <size_t row_bytes>
void copy_rows(std::byte* to, int64_t to_step, const std::byte* from, int64_t from_step,
               int64_t count) {
  for (int64_t k = 0; k < count; ++k)
    std::memcpy(to + k * to_step, from + k * from_step, row_bytes);
}

void copy_strided(std::byte* to, int64_t to_step, const std::byte* from, int64_t from_step,
                  int64_t count, int64_t row_bytes) {
  // A row size that the compiler knows is one load and one store, not a call.
  switch (row_bytes) {
    case 1:
      return copy_rows<1>(to, to_step, from, from_step, count);
    case 2:
      return copy_rows<2>(to, to_step, from, from_step, count);
    case 4:
      return copy_rows<4>(to, to_step, from, from_step, count);
    case 8:
      return copy_rows<8>(to, to_step, from, from_step, count);
    default:
      for (int64_t k = 0; k < count; ++k)
        std::memcpy(to + k * to_step, from + k * from_step, static_cast<size_t>(row_bytes));
  }
}

}  // namespace

void detail::shard_bytes(const Layout& layout, int rank, std::span<const std::byte> stream,
                         std::span<const std::byte> fill, std::span<std::byte> local,
                         int64_t row_bytes) {
  const int64_t rows = check_arrays(layout, rank, stream.size(), local.size(), row_bytes);
  for (const Piece& piece : layout.shard(rank).pieces) {
    const int64_t inside = slots_inside(piece, rows);
    std::byte* to = local.data() + piece.local_begin.value() * row_bytes;
    const std::byte* from = stream.data() + piece.start.value() * row_bytes;
    if (piece.stride == 1)
      copy_run(to, from, inside * row_bytes);
    else
      copy_strided(to, row_bytes, from, piece.stride * row_bytes, inside, row_bytes);
    for (std::byte* at = to + inside * row_bytes; at != to + piece.length * row_bytes;
         at += fill.size())
      std::memcpy(at, fill.data(), fill.size());
  }
}

void detail::unshard_bytes(const Layout& layout, int rank, std::span<const std::byte> local,
                           std::span<std::byte> stream, int64_t row_bytes) {
  const int64_t rows = check_arrays(layout, rank, stream.size(), local.size(), row_bytes);
  for (const Piece& piece : layout.shard(rank).pieces) {
    const int64_t inside = slots_inside(piece, rows);
    const std::byte* from = local.data() + piece.local_begin.value() * row_bytes;
    std::byte* to = stream.data() + piece.start.value() * row_bytes;
    if (piece.stride == 1)
      copy_run(to, from, inside * row_bytes);
    else
      copy_strided(to, piece.stride * row_bytes, from, row_bytes, inside, row_bytes);
  }
}

void shard_rows_reference(const Layout& layout, int rank, std::span<const double> stream,
                          std::span<double> local, int64_t row, double fill) {
  size_t to = 0;
  for (const int32_t slot : shard_index(layout, rank))
    for (int64_t i = 0; i < row; ++i, ++to) {
      const auto from = static_cast<size_t>(slot * row + i);
      local[to] = from < stream.size() ? stream[from] : fill;
    }
}

void unshard_rows_reference(const Layout& layout, int rank, std::span<const double> local,
                            std::span<double> stream, int64_t row) {
  size_t from = 0;
  for (const int32_t slot : shard_index(layout, rank))
    for (int64_t i = 0; i < row; ++i, ++from) {
      const auto to = static_cast<size_t>(slot * row + i);
      if (to < stream.size()) stream[to] = local[from];
    }
}

}  // namespace gyre
