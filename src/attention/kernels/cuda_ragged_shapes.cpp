#include "attention/kernels/cuda_ragged_shapes.hpp"

namespace gyre {
namespace {

bool aligned(ConstMatrixRef m) {
  return reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.stride % 8 == 0;
}

AttentionGraphShape shape_of(const BlockInput& block, const RaggedBatch& batch) {
  const BlockHeads& h = block.heads;
  AttentionGraphShape shape;
  shape.mask = batch.mask;
  shape.window = batch.window;
  shape.heads = h.heads;
  shape.kv_heads = h.kv_heads;
  shape.head_dim = h.head_dim;
  shape.value_dim = h.value_dim();
  shape.scale = h.scale;
  shape.q_stride = block.q.stride;
  shape.k_stride = block.k.stride;
  shape.v_stride = block.v.stride;
  shape.out_stride = h.heads * h.value_dim();
  shape.lse_stride = h.heads;
  return shape;
}

void make_gradient(AttentionGraphShape& shape, const BackwardBlock& block, DirectArrays direct) {
  shape.backward = true;
  shape.d_out_stride = block.d_out.stride;
  shape.d_q_stride = direct.d_q ? block.d_q.stride : block.heads.heads * block.heads.head_dim;
  if (!direct.out) return;
  shape.out_stride = block.out.stride;
  shape.lse_stride = block.lse.stride;
}

}  // namespace

const char* unsupported_reason(const BlockInput& block, ConstMatrixRef d_out) {
  const BlockHeads& h = block.heads;
  if (block.q.type != DType::bf16) return "f32 arrays";
  if (h.head_dim % 16 != 0 || h.value_dim() % 16 != 0)
    return "head_dim or v_head_dim not a multiple of 16";
  // In the library, query head i reads KV head i / (heads / kv_heads).
  const bool whole_groups = h.skew == 0 && h.heads == h.kv_heads * h.group;
  if (!whole_groups && h.kv_heads != 1) return "parts of head groups";
  if (!aligned(block.q) || !aligned(block.k) || !aligned(block.v) ||
      (!d_out.empty() && !aligned(d_out)))
    return "rows that are not 16-byte aligned";
  return nullptr;
}

bool usable(ConstMatrixRef m, DType type) {
  const bool rows = type == DType::f32 ? reinterpret_cast<uintptr_t>(m.data) % 16 == 0 : aligned(m);
  return m.data != nullptr && m.type == type && rows;
}

AttentionGraphShape ragged_shape(const BlockInput& block, const PreparedBatch& ready) {
  AttentionGraphShape shape = shape_of(block, ready.batch);
  shape.batch = ready.entries;
  shape.longest_q = ready.limits.longest_q;
  shape.longest_k = ready.limits.longest_k;
  return shape;
}

AttentionGraphShape even_shape(const BlockInput& block, const PreparedBatch& ready) {
  AttentionGraphShape shape = shape_of(block, ready.batch);
  shape.even = true;
  shape.batch = std::ssize(ready.batch.entries);
  shape.longest_q = shape.out_distance = shape.d_q_distance = ready.batch.longest_q;
  shape.longest_k = ready.batch.longest_k;
  shape.q_distance = ready.even->q_distance;
  shape.k_distance = ready.even->k_distance;
  return shape;
}

DirectArrays direct_arrays(const BackwardBlock& block, const PreparedBatch& ready) {
  return {usable(block.out, DType::bf16) && usable(block.lse, DType::f32),
          block.overwrite_d_q && ready.first_q && usable(block.d_q, DType::bf16)};
}

bool gathers_keys(const BlockInput& block) {
  return block.heads.heads == block.heads.kv_heads;
}

AttentionGraphShape ragged_gradient_shape(const BackwardBlock& block, const PreparedBatch& ready,
                                          DirectArrays direct) {
  AttentionGraphShape shape = ragged_shape(block, ready);
  make_gradient(shape, block, direct);
  if (gathers_keys(block)) {
    shape.k_stride = block.heads.kv_heads * block.heads.head_dim;
    shape.v_stride = block.heads.kv_heads * block.heads.value_dim();
  }
  return shape;
}

AttentionGraphShape even_gradient_shape(const BackwardBlock& block, const PreparedBatch& ready,
                                        DirectArrays direct) {
  AttentionGraphShape shape = even_shape(block, ready);
  make_gradient(shape, block, direct);
  shape.out_distance = shape.q_distance;
  if (direct.d_q) shape.d_q_distance = shape.q_distance;
  shape.lse_stride = 0;
  return shape;
}

}  // namespace gyre
