#pragma once
// Row gather and scatter by an index list on a device, for packing, sharding and their inverses.
//
//     gather_rows:  for i in [0, rows)   out[i] = map[i] in [0, in_rows) ? in[map[i]] : fill
//     scatter_rows: for i in [0, rows)   if map[i] in [0, out_rows)   out[map[i]] = in[i]
//
// Memory bandwidth is the limit: each row is read and written once, and 4 bytes of the map are
// read. Rows whose size and addresses are multiples of 16 bytes move 16 bytes at a time. The writes
// of a gather and the reads of a scatter are sequential. gather_map.hpp assigns rows to threads.
// Rows of less than 32 bytes in random order waste the rest of their 32-byte sectors; the runs of
// slots of a layout do not.

#include <cstdint>

#include "runtime/stream.hpp"
#include "sharding/row_fill.hpp"

namespace gyre {

/// Gathers in [in_rows, row_bytes] by map [rows] into out [rows, row_bytes], all in device memory,
/// without overlap. Asynchronous on `stream`, a CUDA stream. Throws a usage error when row_bytes <
/// 1 or a count is negative.
void gather_rows(Stream& stream, void* out, const void* in, const int32_t* map, int64_t rows,
                 int64_t in_rows, int64_t row_bytes, const RowFill& fill = {});

/// Scatters in [rows, row_bytes] by map [rows], which has no duplicates, into out [out_rows,
/// row_bytes]; rows that no entry names keep their value. Otherwise as gather_rows.
void scatter_rows(Stream& stream, void* out, const void* in, const int32_t* map, int64_t rows,
                  int64_t out_rows, int64_t row_bytes);

}  // namespace gyre
