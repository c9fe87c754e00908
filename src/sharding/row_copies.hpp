#pragma once
// Copies of rows of any number of bytes. All are inline: a run of slots is often a few ids of a
// short document, and a call would take longer than the copy.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace gyre {

inline constexpr int64_t line = 64;  ///< bytes of a cache line

struct Vector {
  std::byte bytes[16];
};

/// Copies a line, all loads before the stores: a load after a store to the same page offset of
/// another page waits for it, which happens between shards of 2^n slots.
inline void copy_line(std::byte* to, const std::byte* from) {
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

/// Copies n to 2n bytes by two copies of n bytes that may overlap.
template <size_t n>
void copy_both_ends(std::byte* to, const std::byte* from, int64_t bytes) {
  std::memcpy(to, from, n);
  std::memcpy(to + bytes - n, from + bytes - n, n);
}

/// Copies at least one cache line. Calls memcpy only above 256 KiB: from 2 KiB on its string
/// instructions are slow where both addresses have the same page offset, as shards of a stream of
/// 2^n slots do (in blocks of 2 KiB it reaches 0.4 of its best rate, this loop 0.7).
inline void copy_lines(std::byte* to, const std::byte* from, int64_t bytes) {
  constexpr int64_t longest = 256 << 10;
  if (bytes > longest) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (int64_t at = 0; at < bytes - line; at += line) copy_line(to + at, from + at);
  copy_line(to + bytes - line, from + bytes - line);
}

/// memcpy for sizes that are mostly tiny (a few ids of a short document) or very large.
inline void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
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

/// Copies whole lines to a line-aligned address by non-temporal stores, which do not read the lines
/// that they overwrite. Readers need a hwy::FlushStream() first. (Highway's own Stream would need
/// run-time dispatch: its baseline target on x86 is scalar.)
inline void stream_lines(std::byte* to, const std::byte* from, int64_t bytes) {
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

/// Bytes from `p` to the next line boundary.
inline int64_t to_line(const std::byte* p) {
  return -reinterpret_cast<uintptr_t>(p) % line;
}

/// Non-temporal copy, except for the incomplete first and last line. (Not inlined: GCC 12 would
/// warn about reads that its branches exclude.)
[[gnu::noinline]] inline void stream_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (to_line(to) == 0 && bytes % line == 0) return stream_lines(to, from, bytes);
  const int64_t head = std::min(to_line(to), bytes), whole = (bytes - head) / line * line;
  copy_bytes(to, from, head);
  stream_lines(to + head, from + head, whole);
  copy_bytes(to + head + whole, from + head + whole, bytes - head - whole);
}

/// Calls body(size) with size = `row_bytes`; common sizes are compile-time constants, so that a row
/// is one load and one store instead of a call.
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
inline void copy_row(std::byte* to, const std::byte* from, int64_t bytes) {
  copy_bytes(to, from, bytes);
}

/// to[k · to_step] = from[k · from_step] for `count` rows of `size` bytes; steps are in bytes.
/// Unrolled by four: the loop overhead would exceed the copies.
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
inline void gather_rows(std::byte* to, const std::byte* from, int64_t step, int64_t count,
                        int64_t row_bytes) {
  for_row_size(row_bytes, [=](auto size) { copy_rows(to, size, from, step, count, size); });
}

/// to[k · step] = from[k]
inline void scatter_rows(std::byte* to, int64_t step, const std::byte* from, int64_t count,
                         int64_t row_bytes) {
  for_row_size(row_bytes, [=](auto size) { copy_rows(to, step, from, size, count, size); });
}

inline void fill_rows(std::byte* to, std::byte* end, std::span<const std::byte> fill) {
  for (; to != end; to += fill.size()) std::memcpy(to, fill.data(), fill.size());
}

/// Writes one shard sequentially by non-temporal stores: buffers short runs and streams long ones
/// directly. Shards of 2^n bytes would otherwise compete for the same few cache lines.
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
      copy_bytes(bytes_ + end_, from, taken);
      end_ += taken, from += taken, bytes -= taken;
      if (end_ == size) flush();
    }
  }
  void flush() {
    if (begin_ == 0 && end_ == size)
      stream_lines(to_, bytes_, size);
    else
      copy_bytes(to_, bytes_ + begin_, end_ - begin_);
    to_ += end_ - begin_;
    begin_ = end_ = 0;
  }

 private:
  static constexpr int64_t size = 8 * line;
  alignas(line) std::byte bytes_[size];
  std::byte* to_;                ///< destination of bytes_[begin_]; line-aligned if begin_ == 0
  int64_t begin_ = 0, end_ = 0;  ///< range of buffered bytes
};

}  // namespace gyre
