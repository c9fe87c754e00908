#pragma once
// Shape of a Llama-style decoder. Names follow Hugging Face's LlamaConfig.

#include <cstdint>
#include <vector>

#include "core/rope_scaling.hpp"

namespace gyre {

/// Properties in which the layers of one model may differ.
struct LayerKind {
  bool rotary = true;  ///< queries and keys have rotary embedding
  int64_t window = 0;  ///< keys that a query sees, up to and including its own; 0: no window
  friend bool operator==(const LayerKind&, const LayerKind&) = default;
};

/// Function f of the MLP: gate <- f(gate) · up. Formulas are in model/elementwise.hpp.
enum class GateActivation { silu, gelu, gelu_tanh };

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
  bool tied_head = false;    ///< the head's weight is the embedding
  bool attention_sinks = false;             ///< logits of query heads, in the softmax's denominator
  double final_soft_cap = 0;                ///< logits <- cap · tanh(logits / cap); 0: unchanged
  std::vector<LayerKind> layer_kinds = {};  ///< [num_hidden_layers]; empty: all as the default

  int64_t rotary_width() const { return rotary_dim == 0 ? head_dim : rotary_dim; }
  /// `layer` counts from 0.
  LayerKind kind_of(int64_t layer) const {
    return layer_kinds.empty() ? LayerKind() : layer_kinds.at(layer);
  }

  int64_t query_width() const { return num_attention_heads * head_dim; }
  int64_t kv_width() const { return num_key_value_heads * head_dim; }
  int64_t parameters() const {
    const int64_t attention = hidden_size * (2 * query_width() + 2 * kv_width());
    const int64_t mlp = 3 * hidden_size * intermediate_size;
    const int64_t biases =
        (qkv_bias ? query_width() + 2 * kv_width() : 0) + (output_bias ? hidden_size : 0);
    const int64_t norms = 2 * hidden_size + (qk_norm ? 2 * head_dim : 0);
    const int64_t sinks = attention_sinks ? num_attention_heads : 0;
    return num_hidden_layers * (attention + mlp + biases + norms + sinks) +
           (tied_head ? 1 : 2) * vocab_padded * hidden_size + hidden_size;
  }
};

}  // namespace gyre
