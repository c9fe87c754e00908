#pragma once
// Calls on reversed rows (reversed_rows.hpp): copies of the inputs, scratch results, and their
// addition to the results of the original call.

#include <map>

#include "attention/kernels/attention_library.hpp"
#include "attention/kernels/block_kernel.hpp"
#include "attention/kernels/cuda_ragged_tables.hpp"
#include "attention/kernels/cuda_scratch.hpp"
#include "core/matrix_ref.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Scratch arrays for the calls of one stream, submitted one after the other.
class ReversedArrays {
 public:
  explicit ReversedArrays(Stream& stream) : stream_(stream) {}

  /// The call on reversed rows for `block`. Its results overwrite scratch arrays; they are valid
  /// until the next call for the same pass.
  ForwardBlock reversed(const ForwardBlock& block, const ReversedCall& call);
  /// Precondition: delta is computed.
  BackwardBlock reversed(const BackwardBlock& block, const ReversedCall& call);

  /// Merges the results of a reversed call into those of `block`, or adds them.
  void add(const ForwardBlock& reversed, const ReversedCall& call, const ForwardBlock& block);
  void add(const BackwardBlock& reversed, const ReversedCall& call, const BackwardBlock& block);

 private:
  /// A copy of the rows that `reads` names.
  MatrixRef copy(AttentionTensor id, ConstMatrixRef from, const DeviceRound& reads, int64_t rows);
  void copy_inputs(BlockInput& to, const BlockInput& from, const ReversedCall& call);

  Stream& stream_;
  std::map<AttentionTensor, Scratch> memory_;
  Scratch delta_;
};

}  // namespace gyre
