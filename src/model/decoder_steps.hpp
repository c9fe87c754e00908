#pragma once
// A forward pass of the decoder as data: what one tensor-parallel rank does to its slots, in order.
// The decoder walks the list and predictions read it, so both use the same operations with the same
// shapes.
//
// Example, one layer:
//
//     Embed        x <- embed[tokens]                AllReduce x
//     Norm         h <- rms_norm(x) · attn_norm
//     Linear       q <- h · wq,  k <- h · wk,  v <- h · wv,  out_gate <- h · wz if output_gate
//     AddBias      q, k, v                           if qkv_bias
//     HeadNorm     q, k                              if qk_norm
//     Rope         q, k                              in layers with rotary embedding
//     Attention    out <- attention(q, k, v)         with sinks if attention_sinks
//     GateMultiply out_gate <- sigmoid(out_gate) · out   if output_gate: instead of out below
//     Linear       partial <- out · wo               AllReduce partial
//     AddBias      partial                           if output_bias
//     Norm         x += partial,  h <- rms_norm(x) · mlp_norm
//     Linear       gate <- h · w_gate,  up <- h · w_up
//     GateMultiply gate <- hidden_act(gate) · up
//     Linear       partial <- gate · w_down          AllReduce partial
//     Norm         x += partial,  h <- rms_norm(x) · final_norm
//     Again        h grows by a copy of the row of each slot that predicts several tokens
//     Score        log-probabilities and entropies of the logits h · headᵀ
//
// A recurrent layer (recurrent_layer.hpp), whose slots may be others, has between its norms
//
//     Relayout     rows of h -> rows of mixer_in, and those of halos
//     Linear       mixer_q <- mixer_in · wq, likewise k, v, z, b, a
//     Recurrence   mixer_out <- mixed(q, k, v, z, b, a)
//     Linear       mixer_partial <- mixer_out · wo   AllReduce mixer_partial
//     Relayout     rows of mixer_partial -> rows of partial

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "core/dtype.hpp"
#include "core/model_config.hpp"

namespace gyre {

/// Arrays of one rank, [slots, width_of()].
enum class Activation {
  x,
  h,
  partial,
  q,
  k,
  v,
  out,
  out_gate,  ///< if output_gate
  gate,
  up,
  mixer_in,  ///< of recurrent layers, on their slots; up to mixer_a also on halos
  mixer_q,
  mixer_k,
  mixer_v,
  mixer_z,
  mixer_b,
  mixer_a,
  mixer_out,
  mixer_partial,
};
inline constexpr size_t activation_kinds = 19;
/// Those that attention does not hold.
inline constexpr Activation activations_of_decoder[] = {
    Activation::x,       Activation::h,         Activation::partial,      Activation::out_gate,
    Activation::gate,    Activation::up,        Activation::mixer_in,     Activation::mixer_q,
    Activation::mixer_k, Activation::mixer_v,   Activation::mixer_z,      Activation::mixer_b,
    Activation::mixer_a, Activation::mixer_out, Activation::mixer_partial};
constexpr bool is_of_recurrent_layers(Activation activation) {
  return activation >= Activation::mixer_in;
}

/// Element types of a decoder in memory. Products, norms and softmax accumulate in f32; angles are
/// f64. Between its projections a recurrent layer is f32.
struct DecoderTypes {
  DType activations = DType::f32;  ///< also of the weights that are matrices
  DType residual = DType::f32;     ///< of the residual stream x
  DType of(Activation activation) const {
    if (activation >= Activation::mixer_q && activation <= Activation::mixer_a) return DType::f32;
    return activation == Activation::x ? residual : activations;
  }
};

enum class Weight {
  embed,  ///< [vocabulary of the rank, hidden]
  attn_norm,
  wq,
  wk,
  wv,
  bq,
  bk,
  bv,
  q_norm,  ///< [head_dim]
  k_norm,
  sinks,  ///< [heads of the rank]
  wo,
  bo,
  wz,  ///< gate of the output, of attention if output_gate and of recurrent layers
  wb,  ///< of recurrent layers, which also have wq, wk, wv and wo
  wa,
  conv_q,  ///< [conv_width, columns of wq of the rank]; f32, as those that follow
  conv_k,
  conv_v,
  a_log,  ///< [value heads of the rank]
  dt_bias,
  o_norm,  ///< [value_dim]
  mlp_norm,
  w_gate,
  w_up,
  w_down,
  final_norm,
  head,  ///< [vocabulary of the rank, hidden]
};
constexpr bool is_of_layer(Weight weight) {
  return weight != Weight::embed && weight != Weight::final_norm && weight != Weight::head;
}

namespace decoder_step {

struct Embed {};
/// Sums over the tensor-parallel group, in place.
struct AllReduce {
  Activation data = Activation::partial;
  const char* what = "";  ///< for traces and errors
};
/// x += partial if `adds`, then h <- rms_norm(x) · weight.
struct Norm {
  Weight weight = Weight::attn_norm;
  bool adds = true;
};
struct Linear {
  Activation in = Activation::h;
  Weight weight = Weight::wq;
  Activation out = Activation::q;
};
/// Adds a bias to each row, in place.
struct AddBias {
  Weight bias = Weight::bq;
  Activation data = Activation::q;
};
/// x <- rms_norm(x) · weight for each head x, in place.
struct HeadNorm {
  Weight weight = Weight::q_norm;
  Activation data = Activation::q;
};
struct Rope {};
struct Attention {};
/// Moves rows to the layout of recurrent layers, or back.
struct Relayout {
  Activation from = Activation::h, to = Activation::mixer_in;
};
/// mixer_out <- what stands between the projections of a recurrent layer.
struct Recurrence {};
/// gate <- activation(gate) · up
struct GateMultiply {
  GateActivation activation = GateActivation::silu;
  Activation gate = Activation::gate, up = Activation::up;
};
/// Appends copies of the rows of h that are scored more than once (LocalBatch::again): from here on
/// h has one row per prediction.
struct Again {};
/// Scores the targets by softmax(h · weightᵀ), tile by tile
/// (logprobs/fused_linear/fused_linear.hpp).
struct Score {
  Weight weight = Weight::head;  ///< the embedding, if it is tied to the head
};

}  // namespace decoder_step

using DecoderOperation =
    std::variant<decoder_step::Embed, decoder_step::AllReduce, decoder_step::Norm,
                 decoder_step::Linear, decoder_step::AddBias, decoder_step::HeadNorm,
                 decoder_step::Rope, decoder_step::Attention, decoder_step::Relayout,
                 decoder_step::Recurrence, decoder_step::GateMultiply, decoder_step::Again,
                 decoder_step::Score>;

struct DecoderStep {
  int64_t layer = 0;  ///< 0: embedding; num_hidden_layers + 1: scores; layers between
  DecoderOperation operation;
};

/// Steps of one forward pass over all layers.
std::vector<DecoderStep> decoder_steps(const ModelConfig& config);

/// KV heads of one of `tp` ranks: a part of all, or one that several ranks share.
int64_t local_kv_heads(const ModelConfig& config, int tp);

/// Rows of the embedding and of the head on one of `tp` ranks.
int64_t local_vocab(const ModelConfig& config, int tp);
/// Rows of the head that the softmax includes, on the rank that has the most.
int64_t scored_vocab(const ModelConfig& config, int tp);

/// Columns of an activation on one of `tp` ranks.
int64_t width_of(Activation activation, const ModelConfig& config, int tp);

}  // namespace gyre
