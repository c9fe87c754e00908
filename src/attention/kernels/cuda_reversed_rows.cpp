#include "attention/kernels/cuda_reversed_rows.hpp"

#include "attention/kernels/cuda_merge.hpp"

namespace gyre {

MatrixRef ReversedArrays::copy(AttentionTensor id, ConstMatrixRef from, const DeviceRound& reads,
                               int64_t rows) {
  const MatrixRef to = memory_[id].matrix(from.type, rows, from.cols);
  cuda_add_rows(reads, from, to, Update::replace, stream_);
  return to;
}

void ReversedArrays::copy_inputs(BlockInput& to, const BlockInput& from, const ReversedCall& call) {
  using enum AttentionTensor;
  to.rectangles = call.rectangles;
  to.q = copy(q, from.q, call.q_reads, call.q_rows);
  to.k = copy(k, from.k, call.k_reads, call.k_rows);
  to.v = copy(v, from.v, call.k_reads, call.k_rows);
}

ForwardBlock ReversedArrays::reversed(const ForwardBlock& block, const ReversedCall& call) {
  using enum AttentionTensor;
  ForwardBlock result = block;
  copy_inputs(result, block, call);
  result.out = memory_[out].matrix(block.out.type, call.q_rows, block.out.cols);
  result.lse = memory_[lse].matrix(DType::f32, call.q_rows, block.lse.cols).as<float>();
  result.overwrite = true;
  return result;
}

BackwardBlock ReversedArrays::reversed(const BackwardBlock& block, const ReversedCall& call) {
  using enum AttentionTensor;
  BackwardBlock result = block;
  copy_inputs(result, block, call);
  result.d_out = copy(d_out, block.d_out, call.q_reads, call.q_rows);
  result.lse = copy(lse, ConstMatrixRef(block.lse), call.q_reads, call.q_rows).as<float>();
  const MatrixRef delta = delta_.matrix(DType::f32, call.q_rows, block.delta.cols);
  cuda_add_rows(call.q_reads, ConstMatrixRef(block.delta), delta, Update::replace, stream_);
  result.delta = delta.as<float>();
  result.out = {};
  result.make_delta = {};
  if (!block.d_q.empty())
    result.d_q = memory_[d_q].matrix(block.d_q.type, call.q_rows, block.d_q.cols);
  if (block.d_k.data != nullptr) {
    result.d_k = memory_[d_k].matrix(DType::f32, call.k_rows, block.d_k.cols).as<float>();
    result.d_v = memory_[d_v].matrix(DType::f32, call.k_rows, block.d_v.cols).as<float>();
  }
  result.overwrite_d_q = !block.d_q.empty();
  result.overwrite_d_kv = block.d_k.data != nullptr;
  return result;
}

void ReversedArrays::add(const ForwardBlock& reversed, const ReversedCall& call,
                         const ForwardBlock& block) {
  cuda_merge_rows(call.q_writes, reversed.out, reversed.lse, block.out, block.lse, Update::add,
                  stream_);
}

void ReversedArrays::add(const BackwardBlock& reversed, const ReversedCall& call,
                         const BackwardBlock& block) {
  if (!block.d_q.empty())
    cuda_add_rows(call.q_writes, reversed.d_q, block.d_q, Update::add, stream_);
  if (block.d_k.data == nullptr) return;
  const RowSums sums[] = {{MatrixRef(reversed.d_k), block.d_k},
                          {MatrixRef(reversed.d_v), block.d_v}};
  cuda_add_rows(call.k_writes, sums, Update::add, stream_);
}

}  // namespace gyre
