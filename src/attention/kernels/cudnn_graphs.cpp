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
    q_ = input("q", AttentionTensor::q, queries(s_.head_dim, s_.q_stride, s_.q_distance),
               AttentionTensor::q_offsets);
    k_ = input("k", AttentionTensor::k, keys(s_.head_dim, s_.k_stride, s_.k_distance),
               AttentionTensor::k_offsets);
    v_ = input("v", AttentionTensor::v, keys(s_.value_dim, s_.v_stride, s_.k_distance),
               AttentionTensor::v_offsets);
    if (s_.even) return;
    q_lengths_ = table("q lengths", AttentionTensor::q_lengths, s_.batch, fe::DataType_t::INT32);
    k_lengths_ = table("k lengths", AttentionTensor::k_lengths, s_.batch, fe::DataType_t::INT32);
  }

  std::shared_ptr<CudnnGraph> forward() {
    fe::graph::SDPA_attributes options;
    // One implementation for all masks: AUTO selects another for some masks, and its refusals would
    // fall back to the tiled kernel.
    options.set_name("attention")
        .set_generate_stats(true)
        .set_implementation(fe::AttentionImplementation_t::COMPOSITE);
    set_common(options);
    const auto [out, lse] = graph_->sdpa(q_, k_, v_, options);
    place(*out, "out", AttentionTensor::out, queries(s_.value_dim, s_.out_stride, s_.out_distance),
          offsets(AttentionTensor::out_offsets));
    out->set_output(true);
    place_lse(*lse);
    lse->set_output(true);
    return graph_;
  }

  /// Omits max_total_seq_len, with which cuDNN 9.19 mixes up d_k and d_v of several entries.
  std::shared_ptr<CudnnGraph> backward() {
    const TensorPtr out =
        input("out", AttentionTensor::out, queries(s_.value_dim, s_.out_stride, s_.out_distance),
              AttentionTensor::out_offsets);
    const TensorPtr d_out = input("d_out", AttentionTensor::d_out,
                                  queries(s_.value_dim, s_.d_out_stride, s_.q_distance),
                                  AttentionTensor::d_out_offsets);
    Tensor_attributes stats;
    place_lse(stats);
    const TensorPtr lse = graph_->tensor(stats);

    fe::graph::SDPA_backward_attributes options;
    options.set_name("attention gradient").set_deterministic_algorithm(s_.deterministic);
    set_common(options);
    const auto [d_q, d_k, d_v] = graph_->sdpa_backward(q_, k_, v_, out, d_out, lse, options);
    place(*d_q, "d_q", AttentionTensor::d_q, queries(s_.head_dim, s_.d_q_stride, s_.d_q_distance),
          offsets(AttentionTensor::d_q_offsets));
    const auto contiguous = [&](int64_t dim) { return keys(dim, s_.kv_heads * dim, s_.longest_k); };
    place(*d_k, "d_k", AttentionTensor::d_k, contiguous(s_.head_dim),
          offsets(AttentionTensor::d_k_offsets));
    place(*d_v, "d_v", AttentionTensor::d_v, contiguous(s_.value_dim),
          offsets(AttentionTensor::d_v_offsets));
    for (const TensorPtr& gradient : {d_q, d_k, d_v}) gradient->set_output(true);
    return graph_;
  }

 private:
  /// Dimensions of an array, per entry.
  struct Rows {
    int64_t heads, count, dim, stride;
    int64_t distance;  ///< rows between entries of an even batch
  };
  Rows queries(int64_t dim, int64_t stride, int64_t distance) const {
    return {s_.heads, s_.longest_q, dim, stride, distance};
  }
  Rows keys(int64_t dim, int64_t stride, int64_t distance) const {
    return {s_.kv_heads, s_.longest_k, dim, stride, distance};
  }

  TensorPtr table(const char* name, AttentionTensor id, int64_t entries, fe::DataType_t type) {
    return graph_->tensor(attributes(name, id)
                              .set_dim({entries, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(type));
  }
  /// Null for an even batch.
  TensorPtr offsets(AttentionTensor id) {
    return s_.even ? nullptr : table("offsets", id, s_.batch + 1, fe::DataType_t::INT64);
  }

  void place(Tensor_attributes& tensor, const char* name, AttentionTensor id, const Rows& rows,
             const TensorPtr& ragged) const {
    tensor.set_name(name)
        .set_uid(static_cast<int64_t>(id))
        .set_data_type(fe::DataType_t::BFLOAT16)
        .set_dim({s_.batch, rows.heads, rows.count, rows.dim})
        .set_stride(
            {(s_.even ? rows.distance : rows.count) * rows.stride, rows.dim, rows.stride, 1});
    if (ragged) tensor.set_ragged_offset(ragged);
  }
  void place_lse(Tensor_attributes& tensor) {
    tensor.set_name("log-sum-exp")
        .set_uid(static_cast<int64_t>(AttentionTensor::lse))
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({s_.batch, s_.heads, s_.longest_q, 1});
    if (s_.even && s_.backward) {
      tensor.set_stride({s_.heads * s_.longest_q, s_.longest_q, 1, 1});
    } else {
      const int64_t rows = s_.even ? s_.out_distance : s_.longest_q;
      tensor.set_stride({rows * s_.lse_stride, 1, s_.lse_stride, 1});
      if (const TensorPtr ragged = offsets(AttentionTensor::lse_offsets))
        tensor.set_ragged_offset(ragged);
    }
  }
  TensorPtr input(const char* name, AttentionTensor id, const Rows& rows,
                  AttentionTensor offsets_id) {
    Tensor_attributes tensor;
    place(tensor, name, id, rows, offsets(offsets_id));
    return graph_->tensor(tensor);
  }

  /// Ragged batches need a padding mask: it makes cuDNN read the lengths.
  template <class Options>
  void set_common(Options& options) const {
    options.set_attn_scale(s_.scale);
    if (!s_.even)
      options.set_padding_mask(true).set_seq_len_q(q_lengths_).set_seq_len_kv(k_lengths_);
    if (const auto diagonal = diagonal_of(s_.mask))
      options.set_diagonal_alignment(*diagonal).set_diagonal_band_right_bound(0);
    // Key j is visible up to the diagonal d if j + bound > d: `bound` keys are visible.
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
