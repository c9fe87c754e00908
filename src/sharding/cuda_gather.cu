#include "core/error.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"
#include "sharding/cuda_gather.hpp"
#include "sharding/gather_map.hpp"

namespace gyre {
namespace {

struct RowMove {
  const std::byte* in;
  std::byte* out;
  const int32_t* map;
  int64_t rows;
  int64_t other_rows;  ///< rows of the array that the map indexes
  RowMapShape shape;
  RowFill fill;
};

/// The first unit of the fill pattern. The pattern has 16 bytes, a whole number of units.
template <class Unit>
__device__ Unit fill_unit(const RowFill& fill) {
  return *reinterpret_cast<const Unit*>(fill.bytes);
}

/// A thread issues all loads before its stores, so that passes do not wait for each other.
template <class Unit, bool gather>
__global__ void __launch_bounds__(RowMapShape::threads) move_rows(const RowMove move) {
  constexpr int passes = RowMapShape::rows_of_thread;
  const RowMapShape& shape = move.shape;
  const int thread = static_cast<int>(threadIdx.x);
  const auto* in = reinterpret_cast<const Unit*>(move.in);
  auto* out = reinterpret_cast<Unit*>(move.out);
  int64_t row[passes];
  int32_t entry[passes];
  for (int p = 0; p < passes; ++p) {
    row[p] = shape.row(blockIdx.x, thread, p);
    entry[p] = row[p] < move.rows ? move.map[row[p]] : -1;
  }
  for (int64_t u = shape.unit(thread); u < shape.units; u += shape.lanes) {
    Unit value[passes];
    for (int p = 0; p < passes; ++p) {
      const int64_t from = gather ? entry[p] : row[p];
      value[p] = names_row(entry[p], move.other_rows) ? in[from * shape.units + u]
                                                      : fill_unit<Unit>(move.fill);
    }
    for (int p = 0; p < passes; ++p) {
      const int64_t to = gather ? row[p] : entry[p];
      const bool writes = gather ? row[p] < move.rows : names_row(entry[p], move.other_rows);
      if (writes) out[to * shape.units + u] = value[p];
    }
  }
}

template <bool gather>
void start(Stream& stream, const RowMove& move) {
  const Launch grid{static_cast<unsigned>(move.shape.blocks(move.rows)), RowMapShape::threads,
                    cuda_handle(stream)};
  switch (move.shape.unit_bytes) {
    case 16:
      return launch(grid, move_rows<uint4, gather>, move);
    case 8:
      return launch(grid, move_rows<uint64_t, gather>, move);
    case 4:
      return launch(grid, move_rows<uint32_t, gather>, move);
    case 2:
      return launch(grid, move_rows<uint16_t, gather>, move);
    default:
      return launch(grid, move_rows<uint8_t, gather>, move);
  }
}

RowMove make_move(const char* what, void* out, const void* in, const int32_t* map, int64_t rows,
                  int64_t other_rows, int64_t row_bytes, const RowFill& fill) {
  if (row_bytes < 1) throw_usage("{}: rows of {} bytes; the least is 1", what, row_bytes);
  if (rows < 0 || other_rows < 0)
    throw_usage("{}: {} and {} rows; the least is 0", what, rows, other_rows);
  const auto addresses = reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(in);
  return {static_cast<const std::byte*>(in),
          static_cast<std::byte*>(out),
          map,
          rows,
          other_rows,
          row_map_shape(row_bytes, addresses),
          fill};
}

}  // namespace

void gather_rows(Stream& stream, void* out, const void* in, const int32_t* map, int64_t rows,
                 int64_t in_rows, int64_t row_bytes, const RowFill& fill) {
  start<true>(stream, make_move("gather_rows", out, in, map, rows, in_rows, row_bytes, fill));
}

void scatter_rows(Stream& stream, void* out, const void* in, const int32_t* map, int64_t rows,
                  int64_t out_rows, int64_t row_bytes) {
  start<false>(stream, make_move("scatter_rows", out, in, map, rows, out_rows, row_bytes, {}));
}

}  // namespace gyre
