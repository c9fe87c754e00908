#pragma once
// What a library is given that multiplies rows which it masks.
//
//     rows of an array     0 .. 4 of an entry | 5, 6 of none: NaN | 7 .. of another entry
//     a tile of keys       0 .. 7, of which 5 .. 7 are masked
//     weights of a query   p0 .. p4, 0, 0, 0: with 0 · NaN, all of the query's results are NaN
//
// Such a library gets copies of its inputs in which rows of no entry are 0. They cost the bytes of
// the arrays, read and written, for each call that has such rows; other calls cost nothing.

#include <cstdint>
#include <map>

#include "attention/kernels/attention_library.hpp"
#include "attention/kernels/cuda_merge.hpp"
#include "attention/kernels/cuda_scratch.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Whether the library's graphs of this direction, mask and head size let NaN of rows that are in
/// no entry into their results: asked of the library itself, by a run of two entries with NaN
/// between. False where it has no such graph. Waits for the stream.
bool find_masked_products(AttentionLibrary& library, const AttentionGraphShape& shape,
                          Stream& stream);

/// Copies for the calls of one stream.
class FiniteCopies {
 public:
  explicit FiniteCopies(Stream& stream) : stream_(stream) {}

  /// The rows of m, as far apart, with 0 in those of `outside`; until the next copy for `id`.
  ConstMatrixRef of(AttentionTensor id, ConstMatrixRef m, const DeviceRound& outside);
  /// Read and written so far.
  int64_t bytes() const { return bytes_; }

 private:
  Stream& stream_;
  std::map<AttentionTensor, Scratch> memory_;
  int64_t bytes_ = 0;
};

}  // namespace gyre
