#pragma once
// Shape of a Llama-style decoder. Names follow Hugging Face's LlamaConfig.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/rope_scaling.hpp"

namespace gyre {

/// Properties in which the layers of one model may differ.
struct LayerKind {
  bool rotary = true;  ///< queries and keys have rotary embedding
  int64_t window = 0;  ///< keys that a query sees, up to and including its own; 0: no window
  /// The layer is recurrent, as RecurrentConfig says, instead of softmax attention.
  bool recurrent = false;
  friend bool operator==(const LayerKind&, const LayerKind&) = default;
};

/// Shape of the recurrent layers of a model: the gated delta rule behind a causal convolution
/// (model/recurrent_layer.hpp). Names in files are those of Qwen3-Next: linear_num_key_heads, ...
struct RecurrentConfig {
  int64_t key_heads = 0, value_heads = 0;  ///< a key head serves several heads of values
  int64_t key_dim = 0, value_dim = 0;
  int64_t conv_width = 0;  ///< tokens of the convolution, its own included
  int64_t key_width() const { return key_heads * key_dim; }
  int64_t value_width() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * key_width() + value_width(); }
  /// Columns of the projections to q, k, v, the gate z, b and a.
  int64_t projected() const { return channels() + value_width() + 2 * value_heads; }
};

/// Function f of the MLP: gate <- f(gate) · up. Formulas are in model/elementwise.hpp. sigmoid is
/// that of attention's output gate.
enum class GateActivation { silu, gelu, gelu_tanh, sigmoid };

struct ModelConfig {
  int64_t vocab_size = 0;  ///< columns in use; token ids are below it
  /// Columns of embed and head. The softmax excludes columns from vocab_size on.
  int64_t vocab_padded = 0;
  int64_t hidden_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate_size = 0;
  double rope_theta = 0;
  double rms_norm_eps = 0;
  /// Number of elements of a head, the first ones, that rotary embedding rotates; 0: all.
  int64_t rotary_dim = 0;
  RopeScaling rope_scaling = {};
  GateActivation hidden_act = GateActivation::silu;
  bool qkv_bias = false;     ///< biases of queries, keys and values
  bool output_bias = false;  ///< bias of attention's output projection
  bool qk_norm = false;      ///< RMS norm of each head's queries and keys, before rotary embedding
  bool output_gate = false;  ///< attention's output is multiplied by sigmoid(h · wz)
  bool tied_head = false;    ///< the head's weight is the embedding
  bool attention_sinks = false;             ///< logits of query heads, in the softmax's denominator
  double final_soft_cap = 0;                ///< logits <- cap · tanh(logits / cap); 0: unchanged
  std::vector<LayerKind> layer_kinds = {};  ///< [num_hidden_layers]; empty: all as the default
  RecurrentConfig recurrent = {};           ///< of the recurrent layers, if there are any

  int64_t rotary_width() const { return rotary_dim == 0 ? head_dim : rotary_dim; }
  /// `layer` counts from 0.
  LayerKind kind_of(int64_t layer) const {
    return layer_kinds.empty() ? LayerKind() : layer_kinds.at(layer);
  }
  int64_t recurrent_layers() const {
    return std::ranges::count(layer_kinds, true, &LayerKind::recurrent);
  }

  int64_t query_width() const { return num_attention_heads * head_dim; }
  int64_t kv_width() const { return num_key_value_heads * head_dim; }
  int64_t parameters() const {
    const int64_t attention =
        hidden_size * ((output_gate ? 3 : 2) * query_width() + 2 * kv_width());
    const int64_t mlp = 3 * hidden_size * intermediate_size;
    const int64_t biases =
        (qkv_bias ? query_width() + 2 * kv_width() : 0) + (output_bias ? hidden_size : 0);
    const int64_t head_norms = qk_norm ? 2 * head_dim : 0;
    const int64_t sinks = attention_sinks ? num_attention_heads : 0;
    const int64_t recurrence = hidden_size * (recurrent.projected() + recurrent.value_width()) +
                               recurrent.conv_width * recurrent.channels() +  //
                               2 * recurrent.value_heads + recurrent.value_dim;
    return num_hidden_layers * (mlp + 2 * hidden_size) + recurrent_layers() * recurrence +
           (num_hidden_layers - recurrent_layers()) * (attention + biases + head_norms + sinks) +
           (tied_head ? 1 : 2) * vocab_padded * hidden_size + hidden_size;
  }
};

}  // namespace gyre
