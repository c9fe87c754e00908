#pragma once
// Copies of rows within the memory of a stream, on the host and on a device. Memory bandwidth is
// the limit: a device should take bytes / bandwidth.
//
//     copy_rows      rows of any strides, converted between f32 and bf16, or added
//     copy_spans     bytes, within a device
//     gather_rows    out[i] = map[i] in [0, in_rows) ? in[map[i]] : fill          within a device
//     scatter_rows   if map[i] in [0, out_rows)   out[map[i]] = in[i]             within a device
//
// A device copies many rows or spans by one launch of one kernel (cuda_row_copy.cu), since most
// copies take less time than a launch. Host and device have the same arithmetic.

#include <cstdint>
#include <span>
#include <type_traits>

#include "core/host_device.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/row_fill.hpp"
#include "runtime/stream.hpp"

struct CUstream_st;

namespace gyre {

/// Memory layout of the rows of an array or of some of its heads: row r of plane p begins at
/// element r · row + p · plane of `data`.
struct RowPlace {
  std::byte* data = nullptr;
  DType type = DType::f32;  ///< f32 or bf16
  int64_t row = 0, plane = 0;
};

/// Copies `rows` rows of `planes` times `width` elements. Elements are rounded to `via`, the type
/// of messages, then to the type of `to`; with `add`, they are added in f32 to the destination.
struct RowCopy {
  int64_t rows = 0, planes = 1, width = 0;
  RowPlace from, to;
  DType via = DType::f32;
  bool add = false;
};

/// Converts x to To; bf16 is rounded to nearest.
template <class To, class From>
GYRE_HOST_DEVICE constexpr To converted(From x) {
  if constexpr (std::is_same_v<To, From>)
    return x;
  else if constexpr (std::is_same_v<To, float>)
    return to_float(x);
  else
    return to_bf16(to_float(x));
}

/// Submits the copies to the stream, which has the memory of both sides, as if they were done one
/// after the other: several may add to the same elements. No copy may read what another one writes.
/// Throws a runtime error for a device in a build without CUDA.
void copy_rows(std::span<const RowCopy> copies, Stream& stream);

/// to <- from, of equal shape; with `add`, to <- to + from. Otherwise as copy_rows.
void copy_matrix(ConstMatrixRef from, MatrixRef to, Stream& stream, bool add = false);

/// Bytes copied to as many others.
struct SpanCopy {
  std::span<const std::byte> from;
  std::span<std::byte> to;
};

/// Submits the copies, which must not overlap, to a CUDA stream: one launch per 128 copies. A
/// single copy is a cudaMemcpyAsync, which needs no multiprocessor.
void cuda_copy_spans(std::span<const SpanCopy> copies, CUstream_st* stream);

/// Gathers in [in_rows, row_bytes] by map [rows] into out [rows, row_bytes], all in device memory,
/// without overlap. Asynchronous on `stream`, a CUDA stream. Throws a usage error when row_bytes <
/// 1 or a count is negative.
void gather_rows(Stream& stream, void* out, const void* in, const int32_t* map, int64_t rows,
                 int64_t in_rows, int64_t row_bytes, const RowFill& fill = {});

/// Scatters in [rows, row_bytes] by map [rows], which has no duplicates, into out [out_rows,
/// row_bytes]; rows that no entry names keep their value. Otherwise as gather_rows.
void scatter_rows(Stream& stream, void* out, const void* in, const int32_t* map, int64_t rows,
                  int64_t out_rows, int64_t row_bytes);

/// copy_rows on a CUDA stream.
void cuda_copy_rows(std::span<const RowCopy> copies, Stream& stream);

}  // namespace gyre
