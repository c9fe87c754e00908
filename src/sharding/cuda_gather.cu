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

/// Moves the rows of block `block` of the shape. A thread issues all loads before its stores, so
/// that passes do not wait for each other.
template <class Unit, bool gather>
__device__ void move_block(const RowMove& move, int64_t block) {
  constexpr int passes = RowMapShape::rows_of_thread;
  const RowMapShape& shape = move.shape;
  const int thread = static_cast<int>(threadIdx.x);
  const auto* in = reinterpret_cast<const Unit*>(move.in);
  auto* out = reinterpret_cast<Unit*>(move.out);
  int64_t row[passes];
  int32_t entry[passes];
  for (int p = 0; p < passes; ++p) {
    row[p] = shape.row(block, thread, p);
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

template <class Unit, bool gather>
__global__ void __launch_bounds__(RowMapShape::threads) move_rows(const RowMove move) {
  move_block<Unit, gather>(move, blockIdx.x);
}

/// Gathers rows of 4 bytes. A map often interleaves runs: the shards of a striped layout are rows
/// 0, 8, 16, ..., then 1, 9, 17, ... Read one by one, each row would take a sector of 32 bytes. A
/// block therefore takes the same part of all runs, whose rows are close together: it reads the
/// span between the first and the last of them into shared memory, and writes them from there.
/// The step between the first two entries tells the number of runs. If the span is long all the
/// same, or there is one run, rows are read one by one.
struct WordTile {
  static constexpr int rows_of_thread = 8;
  static constexpr int rows = rows_of_thread * RowMapShape::threads;  ///< of a block
  static constexpr int span = 2 * rows;                               ///< at most, in words
  static constexpr int max_runs = 32;

  int runs = 1;      ///< of a block
  int width = rows;  ///< rows of each run in a block
  int64_t run = 0;   ///< rows of a run

  __device__ explicit WordTile(const RowMove& move) {
    const int64_t step = move.rows > 1 ? int64_t{move.map[1]} - move.map[0] : 1;
    if (step >= 2 && step <= max_runs) runs = static_cast<int>(step);
    width = rows / runs;
    run = ceil_div(move.rows, int64_t{runs});
  }
  /// The row of item `item` of block `block`; `all` or more if there is none.
  __device__ int64_t row(int64_t block, int item, int64_t all) const {
    const int64_t at = block * width + item % width;
    return item / width < runs && at < run ? item / width * run + at : all;
  }
};

/// Least and greatest row of the entries of a block, for all of its threads.
__device__ int2 block_span(const int32_t (&entries)[WordTile::rows_of_thread], int64_t rows) {
  constexpr int warps = RowMapShape::threads / warp_lanes;
  __shared__ int32_t lows[warps], highs[warps];
  int2 span = {std::numeric_limits<int32_t>::max(), -1};
  for (const int32_t entry : entries)
    if (names_row(entry, rows)) span = {min(span.x, entry), max(span.y, entry)};
  for (int lanes = warp_lanes / 2; lanes > 0; lanes /= 2)
    span = {min(span.x, __shfl_xor_sync(all_lanes, span.x, lanes)),
            max(span.y, __shfl_xor_sync(all_lanes, span.y, lanes))};
  const int warp = static_cast<int>(threadIdx.x) / warp_lanes;
  if (threadIdx.x % warp_lanes == 0) {
    lows[warp] = span.x;
    highs[warp] = span.y;
  }
  __syncthreads();
  for (int w = 0; w < warps; ++w) span = {min(span.x, lows[w]), max(span.y, highs[w])};
  return span;
}

/// Place of a word in shared memory, so that words at distances of 2, 4, ... 32 are in other banks.
__device__ int place_of_word(int word) {
  return word + word / warp_lanes;
}

__global__ void __launch_bounds__(RowMapShape::threads) gather_words(const RowMove move) {
  __shared__ uint32_t words[WordTile::span + WordTile::span / warp_lanes];
  constexpr int items = WordTile::rows_of_thread, threads = RowMapShape::threads;
  const WordTile tile(move);
  if (tile.runs == 1) {
    constexpr int64_t blocks = WordTile::rows_of_thread / RowMapShape::rows_of_thread;
    for (int64_t b = 0; b < blocks; ++b) move_block<uint32_t, true>(move, blockIdx.x * blocks + b);
    return;
  }
  const int thread = static_cast<int>(threadIdx.x);
  const auto* in = reinterpret_cast<const uint32_t*>(move.in);
  auto* out = reinterpret_cast<uint32_t*>(move.out);
  for (int64_t block = blockIdx.x; block * tile.width < tile.run; block += gridDim.x) {
    int64_t row[items];
    int32_t entry[items];
    for (int i = 0; i < items; ++i) {
      row[i] = tile.row(block, thread + i * threads, move.rows);
      entry[i] = row[i] < move.rows ? move.map[row[i]] : -1;
    }
    const int2 span = block_span(entry, move.other_rows);
    const int first = span.x;
    const bool staged = int64_t{span.y} - span.x < WordTile::span;
    if (staged)
      for (int word = thread; word <= span.y - first; word += threads)
        words[place_of_word(word)] = in[first + word];
    __syncthreads();
    uint32_t value[items];
    for (int i = 0; i < items; ++i)
      value[i] = !names_row(entry[i], move.other_rows) ? fill_unit<uint32_t>(move.fill)
                 : staged                              ? words[place_of_word(entry[i] - first)]
                                                       : in[entry[i]];
    for (int i = 0; i < items; ++i)
      if (row[i] < move.rows) out[row[i]] = value[i];
  }
}

template <bool gather>
void start(Stream& stream, const RowMove& move) {
  if (gather && move.shape.unit_bytes == 4 && move.shape.units == 1)
    return launch({static_cast<unsigned>(ceil_div(move.rows, int64_t{WordTile::rows})),
                   RowMapShape::threads, cuda_handle(stream)},
                  gather_words, move);
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
