#pragma once
// Reads the features of a model from its configuration: activations, biases, norms of queries and
// keys, sinks, and differences between layers. Hugging Face's config.json states them by the kind
// of model and by keys, gyre/model by attributes.

#include <functional>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/model_config.hpp"
#include "io/h5.hpp"

namespace gyre {

/// Value of a key; monostate: it is absent; the text "null": it is there, as null.
using ConfigValue = std::function<h5::AttributeValue(const std::string&)>;

/// Which layers of a family have the window 'sliding_window'.
enum class Windows {
  none,     ///< no layer
  all,      ///< all layers; 4096 tokens where the key is absent
  late,     ///< if 'use_sliding_window': by 'layer_types', else layers from 'max_window_layers' on
  no_rope,  ///< if 'use_sliding_window': by 'layer_types', else layers without rotary embedding
};

/// A 'model_type' of Hugging Face's configurations, with the defaults of keys that are absent.
struct ModelFamily {
  const char* name;
  bool qkv_bias = false;  ///< always has biases of queries, keys and values
  bool qk_norm = false;
  bool reads_attention_bias = true;
  int64_t kv_heads = 0;  ///< 0: as many as query heads
  int64_t head_dim = 0;  ///< 0: hidden_size / num_attention_heads
  double rope_theta = 1e4;
  bool tied_head = false;
  int64_t no_rope_interval = 0;  ///< every n-th layer has no rotary embedding; 0: all have it
  Windows windows = Windows::none;
  /// Qwen3-Next and after: layers may be recurrent; attention has an output gate, and turns a
  /// quarter of each head; weights of norms, but those of recurrent layers, are stored less 1.
  bool recurrent = false;
  int64_t experts = 0;  ///< of layers that have them; 0: the family has none
};

/// Name of an attribute of gyre/model and key of a config.json, the size, and the most that it may
/// be.
struct RecurrentSize {
  const char* name;
  int64_t RecurrentConfig::*member;
  int64_t most;
};
inline constexpr RecurrentSize recurrent_sizes[] = {
    {"linear_num_key_heads", &RecurrentConfig::key_heads, 1 << 12},
    {"linear_num_value_heads", &RecurrentConfig::value_heads, 1 << 12},
    {"linear_key_head_dim", &RecurrentConfig::key_dim, 1 << 10},
    {"linear_value_head_dim", &RecurrentConfig::value_dim, 1 << 10},
    {"linear_conv_kernel_dim", &RecurrentConfig::conv_width, 1 << 6}};

/// The family of a 'model_type'; null if it is not known. No type at all means Llama.
const ModelFamily* find_family(const h5::AttributeValue& model_type);
/// "llama, mistral, ..."
std::string family_names();

/// Values of 'hidden_act' that can be computed.
std::vector<std::string> activation_names();

/// Names of the keys of a config.json that read_features() reads.
inline constexpr const char* feature_keys[] = {
    "model_type",     "attention_bias",     "no_rope_layers",    "no_rope_layer_interval",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "hidden_act",     "attn_output_gate"};
/// Further keys that families with recurrent layers read.
inline constexpr const char* recurrent_keys[] = {
    "full_attention_interval", "linear_num_key_heads",  "linear_num_value_heads",
    "linear_key_head_dim",     "linear_value_head_dim", "linear_conv_kernel_dim"};
/// Keys of families with experts. The first three are read: they must say that no layer has any.
inline constexpr const char* expert_keys[] = {
    "num_experts",           "decoder_sparse_step",  "mlp_only_layers",
    "moe_intermediate_size", "num_experts_per_tok",  "shared_expert_intermediate_size",
    "norm_topk_prob",        "output_router_logits", "router_aux_loss_coef"};
/// Sets the features of `config` from a config.json. Its num_hidden_layers must be set.
void read_features(ConfigErrors& errors, const ConfigValue& value, const ModelFamily& family,
                   ModelConfig& config);

/// Names of the attributes of gyre/model that read_feature_attributes() reads.
inline constexpr const char* feature_attributes[] = {"qkv_bias",
                                                     "attention_bias",
                                                     "qk_norm",
                                                     "tie_word_embeddings",
                                                     "final_logit_softcapping",
                                                     "no_rope_layers",
                                                     "sliding_window",
                                                     "use_sliding_window",
                                                     "max_window_layers",
                                                     "layer_types",
                                                     "hidden_act",
                                                     "attn_output_gate",
                                                     "attention_sinks"};
/// Sets the features of `config` from attributes of gyre/model. Its num_hidden_layers must be set.
void read_feature_attributes(ConfigErrors& errors, const ConfigValue& value, ModelConfig& config);
/// Adds an error if 'model_type' of a gyre/model is not known, or has features that `config` lacks.
void check_family(ConfigErrors& errors, const h5::AttributeValue& model_type,
                  const ModelConfig& config);
/// The attributes of gyre/model for the features that `config` has.
std::vector<std::pair<std::string, h5::AttributeValue>> feature_values(const ModelConfig& config);

}  // namespace gyre
