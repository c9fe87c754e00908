#pragma once
// Rows by an index list, on a device: packing, sharding and their inverses are gathers.
//
//     gather_rows:  for i in [0, rows)   out[i] = map[i] in [0, in_rows) ? in[map[i]] : fill
//     scatter_rows: for i in [0, rows)   if map[i] in [0, out_rows)   out[map[i]] = in[i]
//
// The limit is memory: a row is read and written once, and 4 bytes of the map are read. Rows of a
// multiple of 16 bytes at 16-byte aligned addresses move 16 bytes at a time; the writes of a
// gather, and the reads of a scatter, are in order. See gather_map.hpp for how rows are dealt over
// threads. Rows of less than 32 bytes in no order waste the rest of the 32-byte sectors that they
// lie in: runs of slots, as layouts have them, do not.

#include <cstdint>

#include "runtime/stream.hpp"
#include "sharding/row_fill.hpp"

namespace gyre {

/// out [rows, row_bytes] <- in [in_rows, row_bytes] by map [rows], all in device memory and not
/// overlapping. Asynchronous on `stream`, a CUDA stream. Throws a usage error when row_bytes < 1 or
/// a count is negative.
void gather_rows(Stream& stream, void* out, const void* in, const int32_t* map, int64_t rows,
                 int64_t in_rows, int64_t row_bytes, const RowFill& fill = {});

/// out [out_rows, row_bytes] <- in [rows, row_bytes] by map [rows], no two entries the same; rows
/// of `out` that no entry names are left alone. Otherwise as gather_rows.
void scatter_rows(Stream& stream, void* out, const void* in, const int32_t* map, int64_t rows,
                  int64_t out_rows, int64_t row_bytes);

}  // namespace gyre
