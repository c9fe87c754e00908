#pragma once
// Shape of a Llama-style decoder. Names follow Hugging Face's LlamaConfig.

#include <cstdint>

#include "core/rope_scaling.hpp"

namespace gyre {

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
  /// Elements of a head that rotary embedding turns: the first ones. 0: all.
  int64_t rotary_dim = 0;
  RopeScaling rope_scaling = {};

  int64_t rotary_width() const { return rotary_dim == 0 ? head_dim : rotary_dim; }
  int64_t query_width() const { return num_attention_heads * head_dim; }
  int64_t kv_width() const { return num_key_value_heads * head_dim; }
  int64_t parameters() const {
    const int64_t attention = hidden_size * (2 * query_width() + 2 * kv_width());
    const int64_t mlp = 3 * hidden_size * intermediate_size;
    return num_hidden_layers * (attention + mlp + 2 * hidden_size) +
           2 * vocab_padded * hidden_size + hidden_size;
  }
};

}  // namespace gyre
