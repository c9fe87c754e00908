#include "attention/kernels/cudnn_graphs.hpp"

#include <vector>

#include "core/error.hpp"

namespace gyre {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Tensor_attributes;
using TensorPtr = std::shared_ptr<Tensor_attributes>;

Tensor_attributes attributes(const char* name, AttentionTensor id) {
  Tensor_attributes tensor;
  tensor.set_name(name).set_uid(static_cast<int64_t>(id));
  return tensor;
}

class Builder {
 public:
  Builder(const AttentionGraphShape& shape, int sm_version) : s_(shape), graph_(new CudnnGraph) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (sm_version != 0) graph_->set_sm_version(sm_version);  // nodes copy it when they are made
    q_ = rows("q", AttentionTensor::q, s_.heads, s_.longest_q, s_.q_stride,
              AttentionTensor::q_offsets);
    k_ = rows("k", AttentionTensor::k, s_.kv_heads, s_.longest_k, s_.k_stride,
              AttentionTensor::k_offsets);
    v_ = rows("v", AttentionTensor::v, s_.kv_heads, s_.longest_k, s_.v_stride,
              AttentionTensor::v_offsets);
    q_lengths_ = table("q lengths", AttentionTensor::q_lengths, s_.batch, fe::DataType_t::INT32);
    k_lengths_ = table("k lengths", AttentionTensor::k_lengths, s_.batch, fe::DataType_t::INT32);
  }

  std::shared_ptr<CudnnGraph> forward() {
    fe::graph::SDPA_attributes options;
    // One for all masks: AUTO takes another for some, and what that refuses would be the tiled
    // kernel's.
    options.set_name("attention")
        .set_generate_stats(true)
        .set_implementation(fe::AttentionImplementation_t::COMPOSITE);
    set_common(options);
    const auto [out, lse] = graph_->sdpa(q_, k_, v_, options);
    place(*out, "out", AttentionTensor::out, s_.heads, s_.longest_q, s_.out_stride,
          offsets(AttentionTensor::out_offsets));
    out->set_output(true);
    place_lse(*lse);
    lse->set_output(true);
    return graph_;
  }

  std::shared_ptr<CudnnGraph> backward() {
    const int64_t k_columns = s_.kv_heads * s_.head_dim;
    const TensorPtr out = rows("out", AttentionTensor::out, s_.heads, s_.longest_q, s_.out_stride,
                               AttentionTensor::out_offsets);
    const TensorPtr d_out = rows("d_out", AttentionTensor::d_out, s_.heads, s_.longest_q,
                                 s_.d_out_stride, AttentionTensor::d_out_offsets);
    Tensor_attributes stats;
    place_lse(stats);
    const TensorPtr lse = graph_->tensor(stats);

    fe::graph::SDPA_backward_attributes options;
    options.set_name("attention gradient")
        .set_max_total_seq_len_q(s_.q_rows)
        .set_max_total_seq_len_kv(s_.k_rows)
        .set_deterministic_algorithm(s_.deterministic);
    set_common(options);
    const auto [d_q, d_k, d_v] = graph_->sdpa_backward(q_, k_, v_, out, d_out, lse, options);
    const TensorPtr k_offsets = offsets(AttentionTensor::d_k_offsets);
    place(*d_q, "d_q", AttentionTensor::d_q, s_.heads, s_.longest_q, s_.d_q_stride,
          offsets(AttentionTensor::d_q_offsets));
    place(*d_k, "d_k", AttentionTensor::d_k, s_.kv_heads, s_.longest_k, k_columns, k_offsets);
    place(*d_v, "d_v", AttentionTensor::d_v, s_.kv_heads, s_.longest_k, k_columns, k_offsets);
    for (const TensorPtr& gradient : {d_q, d_k, d_v}) gradient->set_output(true);
    return graph_;
  }

 private:
  TensorPtr table(const char* name, AttentionTensor id, int64_t entries, fe::DataType_t type) {
    return graph_->tensor(attributes(name, id)
                              .set_dim({entries, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(type));
  }
  TensorPtr offsets(AttentionTensor id) {
    return table("offsets", id, s_.batch + 1, fe::DataType_t::INT64);
  }

  void place(Tensor_attributes& tensor, const char* name, AttentionTensor id, int64_t heads,
             int64_t longest, int64_t stride, const TensorPtr& ragged) const {
    tensor.set_name(name)
        .set_uid(static_cast<int64_t>(id))
        .set_data_type(fe::DataType_t::BFLOAT16)
        .set_dim({s_.batch, heads, longest, s_.head_dim})
        .set_stride({longest * stride, s_.head_dim, stride, 1})
        .set_ragged_offset(ragged);
  }
  void place_lse(Tensor_attributes& tensor) {
    tensor.set_name("log-sum-exp")
        .set_uid(static_cast<int64_t>(AttentionTensor::lse))
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({s_.batch, s_.heads, s_.longest_q, 1})
        .set_stride({s_.longest_q * s_.lse_stride, 1, s_.lse_stride, 1})
        .set_ragged_offset(offsets(AttentionTensor::lse_offsets));
  }
  TensorPtr rows(const char* name, AttentionTensor id, int64_t heads, int64_t longest,
                 int64_t stride, AttentionTensor offsets_id) {
    Tensor_attributes tensor;
    place(tensor, name, id, heads, longest, stride, offsets(offsets_id));
    return graph_->tensor(tensor);
  }

  /// Ragged batches need a padding mask: it is what reads the lengths.
  template <class Options>
  void set_common(Options& options) const {
    options.set_attn_scale(s_.scale)
        .set_padding_mask(true)
        .set_seq_len_q(q_lengths_)
        .set_seq_len_kv(k_lengths_);
    if (const auto diagonal = diagonal_of(s_.mask))
      options.set_diagonal_alignment(*diagonal).set_diagonal_band_right_bound(0);
    // Key j is seen up to the diagonal d if j + bound > d: as many keys as the bound says.
    if (s_.window > 0) options.set_diagonal_band_left_bound(static_cast<int>(s_.window));
  }

  const AttentionGraphShape& s_;
  std::shared_ptr<CudnnGraph> graph_;
  TensorPtr q_, k_, v_, q_lengths_, k_lengths_;
};

}  // namespace

std::optional<fe::DiagonalAlignment_t> diagonal_of(RaggedMask mask) {
  if (mask == RaggedMask::full) return std::nullopt;
  return mask == RaggedMask::causal ? fe::DiagonalAlignment_t::TOP_LEFT
                                    : fe::DiagonalAlignment_t::BOTTOM_RIGHT;
}

std::shared_ptr<CudnnGraph> make_attention_graph(const AttentionGraphShape& shape, int sm_version) {
  Builder builder(shape, sm_version);
  return shape.backward ? builder.backward() : builder.forward();
}

std::string refusal(const AttentionGraphShape& shape, int sm_version) {
  auto result = make_attention_graph(shape, sm_version)->validate();
  return result.is_good() ? "" : result.get_message();
}

}  // namespace gyre
