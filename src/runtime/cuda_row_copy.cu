#include <algorithm>
#include <map>

#include "runtime/cuda_row_copy.cuh"
#include "runtime/cuda_stream.hpp"

namespace gyre {
namespace {

template <class T, int unit>
struct alignas(unit == 1 ? sizeof(T) : 16) Pack {
  T values[unit];
};

/// Rows of a copy: row r of one side goes to row r of the other.
struct SameRows {
  static constexpr bool mapped = false;
  __device__ int64_t source(int64_t row) const { return row; }
  __device__ int64_t target(int64_t row) const { return row; }
};

/// Row r of one side belongs to row map[r] of the other, or to none (-1).
struct MappedRows {
  static constexpr bool mapped = true;
  const int32_t* map;
  int64_t others;  ///< rows of the array that the map indexes
  bool gathers;    ///< the map indexes the source
  RowFill fill;    ///< of rows without a source
  __device__ int64_t named(int64_t row) const {
    const int32_t entry = map[row];
    return entry >= 0 && entry < others ? entry : -1;
  }
  __device__ int64_t source(int64_t row) const { return gathers ? named(row) : row; }
  __device__ int64_t target(int64_t row) const { return gathers ? row : named(row); }
};

/// Moves the packs of a block from pack `begin` on. A thread loads four packs before it stores the
/// first, to keep four loads in flight. The lines of one copy do not overlap.
template <class From, class To, int unit, bool add, class Rows>
__device__ void copy_packs(const DeviceCopy& copy, int64_t begin, const Rows& rows) {
  constexpr int at_once = 4;
  // Rounding via bf16 changes nothing if the source is bf16 or the result becomes bf16 next.
  constexpr bool via_changes = std::is_same_v<From, float> && (add || std::is_same_v<To, float>);
  const auto* from = reinterpret_cast<const Pack<From, unit>*>(copy.from);
  auto* to = reinterpret_cast<Pack<To, unit>*>(copy.to);
  const int64_t end = min(begin + packs_of_block, copy.packs);
  int64_t at = begin + threadIdx.x;
  PackWalk walk(copy, at);
  while (at < end) {
    Pack<From, unit> x[at_once] = {};
    Pack<To, unit> old[at_once] = {}, *place[at_once];
    GYRE_UNROLL
    for (int i = 0; i < at_once; ++i, walk.advance(), at += copy_threads) {
      place[i] = nullptr;
      if (at >= end) continue;
      const int64_t source = rows.source(walk.row), target = rows.target(walk.row);
      if (Rows::mapped && target < 0) continue;
      place[i] = to + target * copy.to_row + int64_t{walk.plane} * copy.to_plane + walk.pack;
      if constexpr (add) old[i] = *place[i];
      if constexpr (Rows::mapped) {
        x[i] = *reinterpret_cast<const Pack<From, unit>*>(rows.fill.bytes);
        if (source < 0) continue;
      }
      x[i] = from[source * copy.from_row + int64_t{walk.plane} * copy.from_plane + walk.pack];
    }
    GYRE_UNROLL
    for (int i = 0; i < at_once; ++i) {
      if (place[i] == nullptr) continue;
      Pack<To, unit> result;
      GYRE_UNROLL
      for (int e = 0; e < unit; ++e) {
        if constexpr (std::is_same_v<From, float> || std::is_same_v<From, bf16>) {
          float value = to_float(x[i].values[e]);
          if (via_changes && (copy.kind & via_narrow) != 0) value = to_float(to_bf16(value));
          if constexpr (add) value = to_float(old[i].values[e]) + value;
          result.values[e] = converted<To>(value);
        } else {
          result.values[e] = x[i].values[e];
        }
      }
      *place[i] = result;
    }
  }
}

template <class From, class To>
__device__ void convert_packs(const DeviceCopy& copy, int64_t begin) {
  const bool add = (copy.kind & adds) != 0;
  if (copy.unit == 8 && add)
    copy_packs<From, To, 8, true>(copy, begin, SameRows{});
  else if (copy.unit == 8)
    copy_packs<From, To, 8, false>(copy, begin, SameRows{});
  else if (add)
    copy_packs<From, To, 1, true>(copy, begin, SameRows{});
  else
    copy_packs<From, To, 1, false>(copy, begin, SameRows{});
}

template <class Rows>
__device__ void copy_bytes(const DeviceCopy& copy, int64_t begin, const Rows& rows) {
  switch (copy.unit) {
    case 16:
      return copy_packs<uint4, uint4, 1, false>(copy, begin, rows);
    case 8:
      return copy_packs<uint64_t, uint64_t, 1, false>(copy, begin, rows);
    case 4:
      return copy_packs<uint32_t, uint32_t, 1, false>(copy, begin, rows);
    case 2:
      return copy_packs<uint16_t, uint16_t, 1, false>(copy, begin, rows);
    default:
      return copy_packs<uint8_t, uint8_t, 1, false>(copy, begin, rows);
  }
}

__device__ void copy_block(const DeviceCopy& copy, int64_t begin) {
  if ((copy.kind & as_bytes) != 0) return copy_bytes(copy, begin, SameRows{});
  switch (copy.kind & (from_narrow | to_narrow)) {
    case from_narrow | to_narrow:
      return convert_packs<bf16, bf16>(copy, begin);
    case from_narrow:
      return convert_packs<bf16, float>(copy, begin);
    case to_narrow:
      return convert_packs<float, bf16>(copy, begin);
    default:
      return convert_packs<float, float>(copy, begin);
  }
}

template <class Copy>
__global__ void __launch_bounds__(copy_threads)
    copy_table(const __grid_constant__ CopyTable<Copy> table) {
  const auto block = static_cast<int>(blockIdx.x);
  const int index = table.copy_of_block(block);
  const int64_t begin = (block - table.first_block[index]) * packs_of_block;
  if constexpr (std::is_same_v<Copy, DeviceSpan>)
    copy_bytes(table.copies[index], begin, SameRows{});
  else
    copy_block(table.copies[index], begin);
}

__global__ void __launch_bounds__(copy_threads)
    copy_mapped(const DeviceCopy copy, const MappedRows rows) {
  copy_bytes(copy, blockIdx.x * packs_of_block, rows);
}

int32_t small(int64_t x) {
  GYRE_CHECK(x >= 0 && x <= std::numeric_limits<int32_t>::max(), "a stride of {} packs", x);
  return static_cast<int32_t>(x);
}

/// Lines of a copy, measured in elements: bytes, or what is converted.
struct Lines {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t rows = 1, planes = 1, width = 0;
  int64_t from_row = 0, from_plane = 0, to_row = 0, to_plane = 0;

  /// Greatest power of two up to 16 that divides the width and all strides.
  int64_t common_unit() const {
    int64_t bits = width | 16;
    if (rows > 1) bits |= from_row | to_row;
    if (planes > 1) bits |= from_plane | to_plane;
    return bits & -bits;
  }
  /// Greatest power of two up to 16 that divides both addresses.
  int64_t alignment() const {
    const auto bits = static_cast<int64_t>(reinterpret_cast<uintptr_t>(from) |
                                           reinterpret_cast<uintptr_t>(to) | 16U);
    return bits & -bits;
  }
  /// The copy of these lines, `unit` elements at once.
  DeviceCopy in_packs(int64_t unit, int kind) const {
    const int32_t line_packs = small(width / unit);
    return {from,
            to,
            rows * planes * line_packs,
            line_packs,
            small(planes),
            rows > 1 ? small(from_row / unit) : 0,
            planes > 1 ? small(from_plane / unit) : 0,
            rows > 1 ? small(to_row / unit) : 0,
            planes > 1 ? small(to_plane / unit) : 0,
            static_cast<int8_t>(unit),
            static_cast<int8_t>(kind)};
  }
};

/// Calls f(span) for a span, or for its ends and what can be moved 16 bytes at once.
template <class F>
void in_spans(const std::byte* from, std::byte* to, int64_t bytes, F f) {
  constexpr int64_t wide = 16, is_long = 4096;
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % wide);
  const auto from_past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(from) % wide);
  int64_t head = 0, tail = 0;
  if (bytes >= is_long && past == from_past) {
    head = (wide - past) % wide;
    tail = (bytes - head) % wide;
  }
  if (head > 0) f(DeviceSpan{from, to, head});
  if (bytes > 0) f(DeviceSpan{from + head, to + head, bytes - head - tail});
  if (tail > 0) f(DeviceSpan{from + bytes - tail, to + bytes - tail, tail});
}

/// Calls f(copy) for the copies that a device makes of one.
template <class F>
void in_device_copies(const RowCopy& c, F f) {
  const auto narrow = [](DType type) {
    GYRE_CHECK(type == DType::f32 || type == DType::bf16, "rows of {} copied", name_of(type));
    return type == DType::bf16;
  };
  const int kind = (narrow(c.from.type) ? from_narrow : 0) | (narrow(c.to.type) ? to_narrow : 0) |
                   (narrow(c.via) ? via_narrow : 0) | (c.add ? adds : 0);
  Lines lines{c.from.data, c.to.data,    c.rows,   c.planes,  c.width,
              c.from.row,  c.from.plane, c.to.row, c.to.plane};
  if (c.add || c.from.type != c.to.type || (c.via != c.to.type && c.to.type == DType::f32)) {
    const bool eights = lines.alignment() == 16 && lines.common_unit() >= 8;
    return f(lines.in_packs(eights ? 8 : 1, kind));
  }
  for (int64_t* elements :
       {&lines.width, &lines.from_row, &lines.from_plane, &lines.to_row, &lines.to_plane})
    *elements *= size_of(c.to.type);
  if (lines.planes == 1 || (lines.from_plane == lines.width && lines.to_plane == lines.width)) {
    const int64_t row = lines.planes * lines.width;
    if (lines.rows == 1 || (lines.from_row == row && lines.to_row == row))
      return in_spans(lines.from, lines.to, lines.rows * row, f);
  }
  f(lines.in_packs(std::min(lines.alignment(), lines.common_unit()), as_bytes));
}

/// Byte ranges that the copies of a table write.
class Written {
 public:
  /// Adds the bytes that a copy writes; if they overlap earlier ones, adds none and returns false.
  bool take(const RowCopy& c) {
    const int64_t elements = (c.rows - 1) * c.to.row + (c.planes - 1) * c.to.plane + c.width;
    const std::byte* end = c.to.data + elements * size_of(c.to.type);
    const auto next = ranges_.lower_bound(c.to.data);
    if (next != ranges_.end() && next->first < end) return false;
    if (next != ranges_.begin() && std::prev(next)->second > c.to.data) return false;
    ranges_.emplace(c.to.data, end);
    return true;
  }
  void clear() { ranges_.clear(); }

 private:
  std::map<const std::byte*, const std::byte*> ranges_;  // begin -> end
};

template <class Copy>
void start(const CopyTable<Copy>& table, cudaStream_t stream) {
  launch({static_cast<unsigned>(table.blocks), copy_threads, stream}, copy_table<Copy>, table);
}

void copy_by_map(const char* what, Stream& stream, void* out, const void* in, int64_t rows,
                 int64_t row_bytes, const MappedRows& map) {
  if (row_bytes < 1) throw_usage("{}: rows of {} bytes; the least is 1", what, row_bytes);
  if (rows < 0 || map.others < 0)
    throw_usage("{}: {} and {} rows; the least is 0", what, rows, map.others);
  const Lines lines{.from = static_cast<const std::byte*>(in),
                    .to = static_cast<std::byte*>(out),
                    .width = row_bytes};
  DeviceCopy copy = lines.in_packs(std::min(lines.alignment(), lines.common_unit()), as_bytes);
  copy.from_row = copy.to_row = copy.line_packs;
  copy.packs *= rows;
  CopyTable<DeviceCopy> table;
  table.add(copy);
  launch({static_cast<unsigned>(table.blocks), copy_threads, cuda_handle(stream)}, copy_mapped,
         copy, map);
}

}  // namespace

std::vector<CopyTable<DeviceCopy>> copy_tables(std::span<const RowCopy> copies) {
  const bool some_add = std::ranges::any_of(copies, &RowCopy::add);
  std::vector<CopyTable<DeviceCopy>> tables;
  Written written;
  for (const RowCopy& c : copies) {
    if (c.rows * c.planes * c.width == 0) continue;
    const auto begin_table = [&] {
      tables.emplace_back();
      written.clear();
      if (some_add) written.take(c);
    };
    if (some_add && !written.take(c)) begin_table();
    in_device_copies(c, [&](const DeviceCopy& copy) {
      if (tables.empty() || tables.back().full()) begin_table();
      tables.back().add(copy);
    });
  }
  return tables;
}

void cuda_copy_rows(std::span<const RowCopy> copies, Stream& stream) {
  for (const CopyTable<DeviceCopy>& table : copy_tables(copies)) start(table, cuda_handle(stream));
}

void cuda_copy_spans(std::span<const SpanCopy> copies, CUstream_st* stream) {
  if (copies.size() == 1) {
    const SpanCopy& only = copies.front();
    GYRE_CHECK_CUDA(cudaMemcpyAsync(only.to.data(), only.from.data(), only.to.size(),
                                    cudaMemcpyDeviceToDevice, stream));
    return;
  }
  CopyTable<DeviceSpan> table;
  for (const SpanCopy& copy : copies)
    in_spans(copy.from.data(), copy.to.data(), std::ssize(copy.to), [&](const DeviceSpan& span) {
      if (table.full()) {
        start(table, stream);
        table = {};
      }
      table.add(span);
    });
  start(table, stream);
}

void gather_rows(Stream& stream, void* out, const void* in, const int32_t* map, int64_t rows,
                 int64_t in_rows, int64_t row_bytes, const RowFill& fill) {
  copy_by_map("gather_rows", stream, out, in, rows, row_bytes, {map, in_rows, true, fill});
}

void scatter_rows(Stream& stream, void* out, const void* in, const int32_t* map, int64_t rows,
                  int64_t out_rows, int64_t row_bytes) {
  copy_by_map("scatter_rows", stream, out, in, rows, row_bytes, {map, out_rows, false, {}});
}

}  // namespace gyre
