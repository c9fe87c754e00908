#pragma once
// A small decoder with random weights, of which any slice can be read, as from a model file.

#include <cmath>
#include <random>

#include "model/decoder.hpp"

namespace gyre::test {

inline ModelConfig small_config() {
  ModelConfig c;
  c.vocab_size = 37;
  c.vocab_padded = 48;
  c.hidden_size = 24;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 8;
  c.num_key_value_heads = 4;
  c.head_dim = 8;
  c.intermediate_size = 40;
  c.rope_theta = 10000;
  c.rms_norm_eps = 1e-5;
  return c;
}

/// As above, but the first layer and the third of three are recurrent, and the second has an output
/// gate.
inline ModelConfig hybrid_config() {
  ModelConfig c = small_config();
  c.num_hidden_layers = 3;
  c.layer_kinds = {{.recurrent = true}, {}, {.recurrent = true}};
  c.output_gate = true;
  c.rms_norm_eps = 1e-3;  // the norm of a head's output amplifies errors where its terms cancel
  c.recurrent = {.key_heads = 2, .value_heads = 4, .key_dim = 5, .value_dim = 6, .conv_width = 4};
  return c;
}

/// Rows and columns of a weight of `config` by its name in a model file.
inline std::pair<int64_t, int64_t> weight_shape(const ModelConfig& c, const std::string& name) {
  const std::string leaf = name.substr(name.rfind('/') + 1);
  const RecurrentConfig& r = c.recurrent;
  const bool recurs =
      name.starts_with("layers/") && c.kind_of(std::stoll(name.substr(7))).recurrent;
  if (leaf == "conv_q" || leaf == "conv_k") return {r.conv_width, r.key_width()};
  if (leaf == "conv_v") return {r.conv_width, r.value_width()};
  if (leaf == "a_log" || leaf == "dt_bias") return {1, r.value_heads};
  if (leaf == "o_norm") return {1, r.value_dim};
  if (leaf == "wb" || leaf == "wa") return {c.hidden_size, r.value_heads};
  if (recurs && leaf == "wo") return {r.value_width(), c.hidden_size};
  if (recurs && (leaf == "wv" || leaf == "wz")) return {c.hidden_size, r.value_width()};
  if (recurs && (leaf == "wq" || leaf == "wk")) return {c.hidden_size, r.key_width()};
  if (leaf == "embed") return {c.vocab_padded, c.hidden_size};
  if (leaf == "head") return {c.hidden_size, c.vocab_padded};
  if (leaf == "wq" || leaf == "wz") return {c.hidden_size, c.query_width()};
  if (leaf == "wk" || leaf == "wv") return {c.hidden_size, c.kv_width()};
  if (leaf == "bq") return {1, c.query_width()};
  if (leaf == "bk" || leaf == "bv") return {1, c.kv_width()};
  if (leaf == "q_norm" || leaf == "k_norm") return {1, c.head_dim};
  if (leaf == "sinks") return {1, c.num_attention_heads};
  if (leaf == "wo") return {c.query_width(), c.hidden_size};
  if (leaf == "w_gate" || leaf == "w_up") return {c.hidden_size, c.intermediate_size};
  if (leaf == "w_down") return {c.intermediate_size, c.hidden_size};
  return {1, c.hidden_size};  // norms, and the bias of the output
}

/// Normal weights of standard deviation 1.5 / sqrt(fan-in); norms about 1, biases about 0.
/// The padded vocabulary is NaN, so that a read of it shows up.
inline WeightReader random_weights(const ModelConfig& config) {
  return [config](const std::string& name, int64_t row, int64_t rows, int64_t column,
                  int64_t columns) {
    const auto [height, width] = weight_shape(config, name);
    std::mt19937 generator(static_cast<unsigned>(std::hash<std::string>{}(name)));
    const bool norm = name.ends_with("norm");
    std::normal_distribution<float> normal(
        norm ? 1.0f : 0.0f, norm ? 0.2f : 1.5f / std::sqrt(static_cast<float>(height)));
    Buffer<float> part(rows * columns);
    for (int64_t r = 0; r < height; ++r)
      for (int64_t c = 0; c < width; ++c) {
        float value = normal(generator);
        if (name == "embed") value = value * std::sqrt(static_cast<float>(height));
        if ((name == "head" ? c : name == "embed" ? r : 0) >= config.vocab_size) value = NAN;
        if (r >= row && r < row + rows && c >= column && c < column + columns)
          part[(r - row) * columns + c - column] = value;
      }
    return part;
  };
}

}  // namespace gyre::test
