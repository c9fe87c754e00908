#pragma once
// Input copies for libraries that multiply masked rows.
//
//     rows of an array     0 .. 4 of one entry | 5, 6 of no entry: NaN | 7 .. of another entry
//     a tile of keys       0 .. 7, of which 5 .. 7 are masked
//     weights of a query   p0 .. p4, 0, 0, 0: since 0 · NaN = NaN, all results of the query are NaN
//
// Such a library gets copies of its inputs in which rows of no entry are 0. Each call with such
// rows reads and writes the bytes of the arrays once; other calls cost nothing.

#include <cstdint>
#include <map>

#include "attention/kernels/attention_library.hpp"
#include "attention/kernels/cuda_merge.hpp"
#include "attention/kernels/cuda_scratch.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Whether graphs of this pass, mask and head size let NaN from rows outside all entries into their
/// results. Tests the library by a run of two entries with NaN between them. False if there is no
/// such graph. Waits for the stream.
bool find_masked_products(AttentionLibrary& library, const AttentionGraphShape& shape,
                          Stream& stream);

/// Copies of inputs for the calls of one stream.
class FiniteCopies {
 public:
  explicit FiniteCopies(Stream& stream) : stream_(stream) {}

  /// A copy of m with the same stride and 0 in rows `outside`; valid until the next copy for `id`.
  ConstMatrixRef of(AttentionTensor id, ConstMatrixRef m, const DeviceRound& outside);
  /// Bytes read and written so far.
  int64_t bytes() const { return bytes_; }

 private:
  Stream& stream_;
  std::map<AttentionTensor, Scratch> memory_;
  int64_t bytes_ = 0;
};

}  // namespace gyre
