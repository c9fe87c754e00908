#include "sharding/transfer.hpp"

#include <hwy/cache_control.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

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

void check_row(const Layout& layout, int64_t row_bytes) {
  if (row_bytes < 1) throw_usage("layout {}: a row must have at least 1 element", layout.name);
}

/// Rows of the stream; throws when an array has a wrong length.
int64_t check_arrays(const Layout& layout, int rank, size_t stream_bytes, size_t local_bytes,
                     int64_t row_bytes) {
  GYRE_CHECK(rank >= 0 && rank < layout.cp(), "layout {}: rank {} of {}", layout.name, rank,
             layout.cp());
  check_row(layout, row_bytes);
  const int64_t slots = layout.shard(rank).slots;
  check_rows(layout, "shard", local_bytes, row_bytes, slots, slots);
  return check_rows(layout, "stream", stream_bytes, row_bytes, layout.stream_slots,
                    layout.padded_slots);
}

/// The same for all ranks' shards, which lie `step` bytes apart.
int64_t check_arrays(const Layout& layout, size_t stream_bytes, size_t shard_bytes, int64_t step,
                     int64_t row_bytes) {
  check_row(layout, row_bytes);
  const int64_t slots = layout.slots_of_rank();
  if (step == slots * row_bytes)
    check_rows(layout, "array of all shards", shard_bytes, row_bytes, layout.padded_slots,
               layout.padded_slots);
  else
    GYRE_CHECK(
        step > slots * row_bytes && layout.cp() > 0 &&
            static_cast<int64_t>(shard_bytes) == (layout.cp() - 1) * step + slots * row_bytes,
        "layout {}: {} bytes of shards {} bytes apart", layout.name, shard_bytes, step);
  return check_rows(layout, "stream", stream_bytes, row_bytes, layout.stream_slots,
                    layout.padded_slots);
}

/// Slots of a piece that lie inside a stream of `rows` rows; the others follow them.
int64_t slots_inside(const SlotRun& piece, int64_t rows) {
  const int64_t left = rows - piece.start.value();
  if (piece.stride == 1) return std::clamp<int64_t>(left, 0, piece.length);  // no division
  return std::clamp<int64_t>(ceil_div(left, piece.stride), 0, piece.length);
}

constexpr int64_t line = 64;        ///< bytes of a cache line
constexpr int64_t long_run = 1024;  ///< bytes from which on a run is worth two broken lines

struct Vector {
  std::byte bytes[16];
};

/// Loads before stores: a load that follows a store to the same offset of another page, as between
/// shards of 2^n slots, waits for it.
void copy_line(std::byte* to, const std::byte* from) {
  Vector a, b, c, d;
  std::memcpy(&a, from, 16);
  std::memcpy(&b, from + 16, 16);
  std::memcpy(&c, from + 32, 16);
  std::memcpy(&d, from + 48, 16);
  std::memcpy(to, &a, 16);
  std::memcpy(to + 16, &b, 16);
  std::memcpy(to + 32, &c, 16);
  std::memcpy(to + 48, &d, 16);
}

/// `bytes` in n .. 2n, by two copies of n bytes that may overlap.
template <size_t n>
void copy_both_ends(std::byte* to, const std::byte* from, int64_t bytes) {
  std::memcpy(to, from, n);
  std::memcpy(to + bytes - n, from + bytes - n, n);
}

/// A run of a line or more. No call of memcpy below 256 KiB: from 2 KiB on its string instructions
/// are slow where both addresses have the same offset in a page, as shards of a stream of 2^n slots
/// do (2 KiB at a time: 0.4 of the rate of one large memcpy, against 0.7).
void copy_lines(std::byte* to, const std::byte* from, int64_t bytes) {
  constexpr int64_t longest = 256 << 10;
  if (bytes > longest) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  for (int64_t at = 0; at < bytes - line; at += line) copy_line(to + at, from + at);
  copy_line(to + bytes - line, from + bytes - line);
}

/// memcpy; most runs are some ids of a short document or very long.
inline void copy_run(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes >= line)
    copy_lines(to, from, bytes);
  else if (bytes >= 32)
    copy_both_ends<32>(to, from, bytes);
  else if (bytes >= 16)
    copy_both_ends<16>(to, from, bytes);
  else if (bytes >= 8)
    copy_both_ends<8>(to, from, bytes);
  else if (bytes >= 4)
    copy_both_ends<4>(to, from, bytes);
  else
    for (int64_t at = 0; at < bytes; ++at) to[at] = from[at];
}

/// Whole lines to an address at the begin of one, past the caches: a store then does not read the
/// line that it overwrites. Readers need a hwy::FlushStream() first. (Highway's own Stream would
/// need run-time dispatch: its baseline target on x86 is scalar.)
void stream_lines(std::byte* to, const std::byte* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += line) {
#if defined(__SSE2__)
    const auto* in = reinterpret_cast<const __m128i*>(from + at);
    auto* out = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
#else
    copy_line(to + at, from + at);
#endif
  }
}

/// Bytes from `p` to the next begin of a line.
int64_t to_line(const std::byte* p) {
  return static_cast<int64_t>(-reinterpret_cast<uintptr_t>(p) % line);
}

/// A run past the caches but for its broken first and last line. (Not inlined: GCC 12 would warn of
/// reads that its branches exclude.)
[[gnu::noinline]] void stream_run(std::byte* to, const std::byte* from, int64_t bytes) {
  if (to_line(to) == 0 && bytes % line == 0) return stream_lines(to, from, bytes);
  const int64_t head = std::min(to_line(to), bytes), whole = (bytes - head) / line * line;
  copy_run(to, from, head);
  stream_lines(to + head, from + head, whole);
  copy_run(to + head + whole, from + head + whole, bytes - head - whole);
}

/// body(size) for `row_bytes` rows; a size that the compiler knows makes a row one load and one
/// store, not a call.
template <class Body>
void for_row_size(int64_t row_bytes, Body body) {
  switch (row_bytes) {
    case 1:
      return body(std::integral_constant<int64_t, 1>());
    case 2:
      return body(std::integral_constant<int64_t, 2>());
    case 4:
      return body(std::integral_constant<int64_t, 4>());
    case 8:
      return body(std::integral_constant<int64_t, 8>());
    case 16:
      return body(std::integral_constant<int64_t, 16>());
    case 64:
      return body(std::integral_constant<int64_t, 64>());
    default:
      return body(row_bytes);
  }
}

template <int64_t n>
void copy_row(std::byte* to, const std::byte* from, std::integral_constant<int64_t, n>) {
  std::memcpy(to, from, n);
}
void copy_row(std::byte* to, const std::byte* from, int64_t bytes) {
  copy_run(to, from, bytes);
}

/// to[k · to_step] = from[k · from_step] for `count` rows of `size`; steps in bytes. Four at a
/// time: the loop would cost more than the rows.
template <class Size>
void copy_rows(std::byte* to, int64_t to_step, const std::byte* from, int64_t from_step,
               int64_t count, Size size) {
  for (; count >= 4; count -= 4, to += 4 * to_step, from += 4 * from_step) {
    copy_row(to, from, size);
    copy_row(to + to_step, from + from_step, size);
    copy_row(to + 2 * to_step, from + 2 * from_step, size);
    copy_row(to + 3 * to_step, from + 3 * from_step, size);
  }
  for (; count > 0; --count, to += to_step, from += from_step) copy_row(to, from, size);
}

/// to[k] = from[k · step]
void gather_rows(std::byte* to, const std::byte* from, int64_t step, int64_t count,
                 int64_t row_bytes) {
  for_row_size(row_bytes, [=](auto size) { copy_rows(to, size, from, step, count, size); });
}

/// to[k · step] = from[k]
void scatter_rows(std::byte* to, int64_t step, const std::byte* from, int64_t count,
                  int64_t row_bytes) {
  for_row_size(row_bytes, [=](auto size) { copy_rows(to, step, from, size, count, size); });
}

void fill_rows(std::byte* to, std::byte* end, std::span<const std::byte> fill) {
  for (; to != end; to += fill.size()) std::memcpy(to, fill.data(), fill.size());
}

/// visit(rank, piece) for the pieces of all ranks in stream order. They tile the stream, so that
/// the next one begins where the last one ended, mostly on the next rank, on the same one or on the
/// one before: three comparisons, else up to one a rank. False, after some visits or none, if a
/// piece has a stride or a rank's pieces are not in stream order.
template <class Visit>
bool walk_stream(const Layout& layout, Visit visit) {
  const auto cp = static_cast<size_t>(layout.cp());
  std::vector<const SlotRun*> ahead(cp + 2), ends(cp + 2);  // of ranks 1 .. cp; both ends have none
  std::vector<int64_t> begins(cp + 2, -1);
  for (size_t r = 1; r <= cp; ++r) {
    const std::vector<SlotRun>& pieces = layout.shards[r - 1].pieces;
    ahead[r] = pieces.data();
    ends[r] = pieces.data() + pieces.size();
    if (!pieces.empty()) begins[r] = pieces.front().start.value();
  }
  size_t r = 1;
  for (int64_t at = 0; at < layout.padded_slots;) {
    if (begins[r + 1] == at)
      ++r;
    else if (begins[r] != at && begins[r - 1] == at)
      --r;
    else if (begins[r] != at)
      r = static_cast<size_t>(std::find(begins.begin(), begins.end(), at) - begins.begin());
    if (r > cp) return false;
    const SlotRun& piece = *ahead[r];
    if (piece.stride != 1) return false;
    visit(r - 1, piece);
    at += piece.length;
    begins[r] = ++ahead[r] == ends[r] ? -1 : ahead[r]->start.value();
  }
  return true;
}

/// Writes one shard from its begin on, past the caches: short runs are collected, long ones pass.
/// Shards of 2^n bytes would otherwise compete for the same few lines of the caches.
class ShardWriter {
 public:
  explicit ShardWriter(std::byte* to) : to_(to) {
    if (to_line(to) > 0) begin_ = end_ = line - to_line(to);
  }
  void append(const std::byte* from, int64_t bytes) {
    while (bytes > 0) {
      if (end_ == 0 && bytes >= size) {
        const int64_t whole = bytes / line * line;
        stream_lines(to_, from, whole);
        to_ += whole, from += whole, bytes -= whole;
      }
      const int64_t taken = std::min(bytes, size - end_);
      copy_run(bytes_ + end_, from, taken);
      end_ += taken, from += taken, bytes -= taken;
      if (end_ == size) flush();
    }
  }
  void flush() {
    if (begin_ == 0 && end_ == size)
      stream_lines(to_, bytes_, size);
    else
      copy_run(to_, bytes_ + begin_, end_ - begin_);
    to_ += end_ - begin_;
    begin_ = end_ = 0;
  }

 private:
  static constexpr int64_t size = 8 * line;
  alignas(line) std::byte bytes_[size];
  std::byte* to_;                ///< where bytes_[begin_] belongs; at a line's begin if begin_ == 0
  int64_t begin_ = 0, end_ = 0;  ///< what is collected
};

/// Whether the runs of a layout have at least `run` bytes, in the mean.
bool mean_run_reaches(int64_t run, const Layout& layout, int64_t row_bytes) {
  int64_t pieces = 0;
  for (const Shard& shard : layout.shards) pieces += std::ssize(shard.pieces);
  return layout.padded_slots * row_bytes >= pieces * run;
}

bool interleaved(const Layout& layout) {
  for (int r = 0; r < layout.cp(); ++r) {
    const std::vector<SlotRun>& pieces = layout.shard(r).pieces;
    if (pieces.size() != 1 || pieces[0].start.value() != r || pieces[0].stride != layout.cp())
      return false;
  }
  return layout.cp() > 1;
}

/// Slot t of the stream is slot t / cp of rank t mod cp: blocks of some slots of each rank, which
/// stay in the first cache while every rank takes, or gives, its part of each line. They cover the
/// whole blocks of a stream of `rows` rows; the rest is moved as pieces.
struct Interleave {
  int64_t cp, rows;

  template <class Size>
  static constexpr int64_t block(Size size) {
    return size < line ? 4 * line / size : 1;
  }
  int64_t end(int64_t row_bytes) const { return rows / (cp * block(row_bytes)) * block(row_bytes); }

  template <class Size>
  void shard(const std::byte* stream, std::byte* shards, int64_t each, Size size) const {
    alignas(line) std::byte collected[4 * line];
    const int64_t n = block(size), step = cp * size;
    for (int64_t first = 0; first < end(size); first += n)
      for (int64_t r = 0; r < cp; ++r) {
        const std::byte* from = stream + first * step + r * size;
        if (size < line) {
          copy_rows(collected, size, from, step, n, size);
          from = collected;
        }
        stream_run(shards + r * each + first * size, from, n * size);
      }
  }
  template <class Size>
  void unshard(const std::byte* shards, int64_t each, std::byte* stream, Size size) const {
    const int64_t n = block(size), step = cp * size;
    std::vector<std::byte> collected(size < line ? static_cast<size_t>(n * step) : 0);
    for (int64_t first = 0; first < end(size); first += n) {
      for (int64_t r = 0; r < cp; ++r) {
        const std::byte* from = shards + r * each + first * size;
        if (size < line)
          copy_rows(collected.data() + r * size, step, from, size, n, size);
        else
          stream_run(stream + first * step + r * size, from, size);
      }
      if (size < line) stream_run(stream + first * step, collected.data(), n * step);
    }
  }
};

/// The slots of a piece from `first` on.
SlotRun rest_of(const SlotRun& piece, int64_t first) {
  return {piece.start + first * piece.stride, piece.stride, piece.length - first,
          piece.local_begin + first};
}

/// One piece of a shard <- a stream of `rows` rows.
inline void shard_piece(const SlotRun& piece, std::span<const std::byte> stream, int64_t rows,
                        std::span<const std::byte> fill, std::byte* shard, int64_t row_bytes) {
  const int64_t inside = slots_inside(piece, rows);
  std::byte* to = shard + piece.local_begin.value() * row_bytes;
  const std::byte* from = stream.data() + piece.start.value() * row_bytes;
  if (piece.stride == 1)
    copy_run(to, from, inside * row_bytes);
  else
    gather_rows(to, from, piece.stride * row_bytes, inside, row_bytes);
  fill_rows(to + inside * row_bytes, to + piece.length * row_bytes, fill);
}

/// A stream of `rows` rows <- one piece of a shard.
inline void unshard_piece(const SlotRun& piece, const std::byte* shard, std::byte* stream,
                          int64_t rows, int64_t row_bytes) {
  const int64_t inside = slots_inside(piece, rows);
  const std::byte* from = shard + piece.local_begin.value() * row_bytes;
  std::byte* to = stream + piece.start.value() * row_bytes;
  if (piece.stride == 1)
    copy_run(to, from, inside * row_bytes);
  else
    scatter_rows(to, piece.stride * row_bytes, from, inside, row_bytes);
}

/// Shards of all ranks past the caches; false as walk_stream.
bool stream_shards(const Layout& layout, std::span<const std::byte> stream, int64_t rows,
                   std::span<const std::byte> fill, std::byte* shards, int64_t row_bytes) {
  const int64_t each = layout.slots_of_rank() * row_bytes;
  std::vector<ShardWriter> writers;
  writers.reserve(static_cast<size_t>(layout.cp()));
  for (int64_t r = 0; r < layout.cp(); ++r) writers.emplace_back(shards + r * each);
  const bool whole = walk_stream(layout, [&](size_t r, const SlotRun& piece) {
    const int64_t inside = slots_inside(piece, rows);
    writers[r].append(stream.data() + piece.start.value() * row_bytes, inside * row_bytes);
    std::byte* to = shards + static_cast<int64_t>(r) * each;
    fill_rows(to + (piece.local_begin.value() + inside) * row_bytes,
              to + (piece.local_begin.value() + piece.length) * row_bytes, fill);
  });
  for (ShardWriter& writer : writers) writer.flush();
  hwy::FlushStream();
  return whole;
}

/// The stream past the caches; false as walk_stream.
bool stream_stream(const Layout& layout, const std::byte* shards, int64_t step, std::byte* stream,
                   int64_t rows, int64_t row_bytes) {
  const bool whole = walk_stream(layout, [&](size_t r, const SlotRun& piece) {
    std::byte* to = stream + piece.start.value() * row_bytes;
    const std::byte* from =
        shards + static_cast<int64_t>(r) * step + piece.local_begin.value() * row_bytes;
    const int64_t bytes = slots_inside(piece, rows) * row_bytes;
    if (bytes < long_run)
      copy_run(to, from, bytes);
    else
      stream_run(to, from, bytes);
  });
  hwy::FlushStream();
  return whole;
}

}  // namespace

void detail::shard_bytes(const Layout& layout, int rank, std::span<const std::byte> stream,
                         std::span<const std::byte> fill, std::span<std::byte> local,
                         int64_t row_bytes) {
  const int64_t rows = check_arrays(layout, rank, stream.size(), local.size(), row_bytes);
  for (const SlotRun& piece : layout.shard(rank).pieces)
    shard_piece(piece, stream, rows, fill, local.data(), row_bytes);
}

void detail::unshard_bytes(const Layout& layout, int rank, std::span<const std::byte> local,
                           std::span<std::byte> stream, int64_t row_bytes) {
  const int64_t rows = check_arrays(layout, rank, stream.size(), local.size(), row_bytes);
  for (const SlotRun& piece : layout.shard(rank).pieces)
    unshard_piece(piece, local.data(), stream.data(), rows, row_bytes);
}

void detail::shard_all_bytes(const Layout& layout, std::span<const std::byte> stream,
                             std::span<const std::byte> fill, std::span<std::byte> shards,
                             int64_t row_bytes, int64_t cached_bytes) {
  const int64_t each = layout.slots_of_rank() * row_bytes;
  const int64_t rows = check_arrays(layout, stream.size(), shards.size(), each, row_bytes);
  const auto move = [&](size_t r, const SlotRun& piece) {
    shard_piece(piece, stream, rows, fill, shards.data() + static_cast<int64_t>(r) * each,
                row_bytes);
  };
  const bool cached = layout.padded_slots * row_bytes < cached_bytes;
  if (!cached && interleaved(layout)) {
    const Interleave blocks{layout.cp(), rows};
    for_row_size(row_bytes,
                 [&](auto size) { blocks.shard(stream.data(), shards.data(), each, size); });
    hwy::FlushStream();
    for (size_t r = 0; r < layout.shards.size(); ++r)
      move(r, rest_of(layout.shards[r].pieces[0], blocks.end(row_bytes)));
    return;
  }
  const bool done =
      !cached && (mean_run_reaches(line, layout, row_bytes)
                      ? stream_shards(layout, stream, rows, fill, shards.data(), row_bytes)
                      : walk_stream(layout, move));
  if (done) return;
  for (size_t r = 0; r < layout.shards.size(); ++r)
    for (const SlotRun& piece : layout.shards[r].pieces) move(r, piece);
}

void detail::unshard_all_bytes(const Layout& layout, std::span<const std::byte> shards,
                               int64_t step, std::span<std::byte> stream, int64_t row_bytes,
                               int64_t cached_bytes) {
  const int64_t rows = check_arrays(layout, stream.size(), shards.size(), step, row_bytes);
  const auto move = [&](size_t r, const SlotRun& piece) {
    unshard_piece(piece, shards.data() + static_cast<int64_t>(r) * step, stream.data(), rows,
                  row_bytes);
  };
  const bool cached = layout.padded_slots * row_bytes < cached_bytes;
  if (!cached && interleaved(layout)) {
    const Interleave blocks{layout.cp(), rows};
    for_row_size(row_bytes,
                 [&](auto size) { blocks.unshard(shards.data(), step, stream.data(), size); });
    hwy::FlushStream();
    for (size_t r = 0; r < layout.shards.size(); ++r)
      move(r, rest_of(layout.shards[r].pieces[0], blocks.end(row_bytes)));
    return;
  }
  const bool done =
      !cached && (mean_run_reaches(long_run, layout, row_bytes)
                      ? stream_stream(layout, shards.data(), step, stream.data(), rows, row_bytes)
                      : walk_stream(layout, move));
  if (done) return;
  for (size_t r = 0; r < layout.shards.size(); ++r)
    for (const SlotRun& piece : layout.shards[r].pieces) move(r, piece);
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
