#include "io/checkpoints/model_features.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/json.hpp"
#include "io/schemas/schema_names.hpp"

namespace gyre {
namespace {

using h5::AttributeValue;

/// Defaults are those of the configuration classes of transformers.
constexpr ModelFamily families[] = {
    {.name = "llama"},
    {.name = "mistral", .reads_attention_bias = false, .kv_heads = 8, .windows = Windows::all},
    {.name = "qwen2",
     .qkv_bias = true,
     .reads_attention_bias = false,
     .kv_heads = 32,
     .windows = Windows::late},
    {.name = "qwen3", .qk_norm = true, .kv_heads = 32, .head_dim = 128, .windows = Windows::late},
    {.name = "smollm3",
     .kv_heads = 4,
     .rope_theta = 2e6,
     .tied_head = true,
     .no_rope_interval = 4,
     .windows = Windows::no_rope},
    {.name = "qwen3_next",
     .qk_norm = true,
     .kv_heads = 2,
     .head_dim = 256,
     .recurrent = true,
     .experts = 512},
    {.name = "qwen3_5_text", .qk_norm = true, .kv_heads = 4, .head_dim = 256, .recurrent = true},
};

/// Values of 'hidden_act', named as in transformers. Of several names for one function, the first
/// is written.
constexpr std::pair<const char*, GateActivation> activations[] = {
    {"silu", GateActivation::silu},          {"swish", GateActivation::silu},
    {"gelu", GateActivation::gelu},          {"gelu_pytorch_tanh", GateActivation::gelu_tanh},
    {"gelu_new", GateActivation::gelu_tanh}, {"gelu_fast", GateActivation::gelu_tanh},
};

bool is_absent(const AttributeValue& value) {
  return value == AttributeValue();
}
bool is_given(const AttributeValue& value) {
  return !is_absent(value) && value != AttributeValue(std::string("null"));
}

bool flag(ConfigErrors& errors, const char* key, const AttributeValue& value) {
  if (is_absent(value) || is_neutral(value, 0)) return false;
  const auto* truth = std::get_if<bool>(&value);
  const auto* whole = std::get_if<int64_t>(&value);
  if ((truth == nullptr || !*truth) && (whole == nullptr || *whole != 1))
    errors.add("'{}' is {}; wanted: true or false", key, to_string(value));
  return true;
}

/// A whole number from `least` on, or `absent` where there is none.
int64_t number_of(ConfigErrors& errors, const char* key, const AttributeValue& value, int64_t least,
                  int64_t absent) {
  const auto* whole = std::get_if<int64_t>(&value);
  if (!is_given(value)) return absent;
  if (whole != nullptr && *whole >= least) return *whole;
  errors.add("'{}' is {}; wanted: a number from {} on", key, to_string(value), least);
  return absent;
}

/// Elements of a JSON list, one for each layer, each accepted by `parse`; otherwise adds an error.
template <class T, class Parse>
std::vector<T> of_layers(ConfigErrors& errors, const char* key, const AttributeValue& value,
                         int64_t layers, const char* wanted, const Parse& parse) {
  std::vector<T> list;
  const auto* text = std::get_if<std::string>(&value);
  try {
    Json json = text == nullptr ? Json() : parse_json("", *text, "");
    if (!json.is_array()) json = Json::array();
    for (const Json& item : json)
      if (const std::optional<T> one = parse(item)) list.push_back(*one);
    if (std::ssize(json) == layers && json.size() == list.size()) return list;
  } catch (const Error&) {
    list.clear();
  }
  errors.add("'{}' is {}; wanted: a list of {} for each of {} layers", key, to_string(value),
             wanted, layers);
  return {};
}

/// Sets which layers have rotary embedding, from a list of 1 (yes) and 0 for each layer.
void read_no_rope_layers(ConfigErrors& errors, const AttributeValue& value, ModelConfig& config) {
  const std::vector<int64_t> turns =
      of_layers<int64_t>(errors, "no_rope_layers", value, config.num_hidden_layers, "1 or 0",
                         [](const Json& item) -> std::optional<int64_t> {
                           const std::optional<int64_t> number = whole_number(item);
                           return number == 0 || number == 1 ? number : std::nullopt;
                         });
  for (size_t l = 0; l < turns.size(); ++l) config.layer_kinds[l].rotary = turns[l] == 1;
}

/// The window in tokens: 0 for null, false and the like, `absent` where the key is absent.
int64_t window_of(ConfigErrors& errors, const AttributeValue& value, int64_t absent) {
  if (is_absent(value)) return absent;
  if (is_neutral(value, 0)) return 0;
  const auto* whole = std::get_if<int64_t>(&value);
  if (whole != nullptr && *whole > 0) return *whole;
  errors.add("'sliding_window' is {}; wanted: a number of tokens from 1 on", to_string(value));
  return 0;
}

enum class LayerType { full, sliding, recurrent };

/// Sets the window of each layer whose type is "sliding_attention", and which layers are recurrent.
void read_layer_types(ConfigErrors& errors, const AttributeValue& value, int64_t window,
                      bool may_recur, ModelConfig& config) {
  if (value == AttributeValue(std::string("full_attention"))) return;
  const std::vector<LayerType> types = of_layers<LayerType>(
      errors, "layer_types", value, config.num_hidden_layers,
      may_recur ? R"("full_attention", "sliding_attention" or "linear_attention")"
                : R"("full_attention" or "sliding_attention")",
      [&](const Json& item) -> std::optional<LayerType> {
        if (item == "sliding_attention") return LayerType::sliding;
        if (item == "linear_attention" && may_recur) return LayerType::recurrent;
        return item == "full_attention" ? std::optional(LayerType::full) : std::nullopt;
      });
  if (window == 0 && std::ranges::count(types, LayerType::sliding) > 0)
    errors.add(R"('layer_types' has "sliding_attention", but there is no 'sliding_window')");
  for (size_t l = 0; l < types.size(); ++l) {
    config.layer_kinds[l].window = types[l] == LayerType::sliding ? window : 0;
    config.layer_kinds[l].recurrent = types[l] == LayerType::recurrent;
  }
}

/// Adds errors for keys of windows that the family does not read, unless they ask for no window.
void refuse_windows(ConfigErrors& errors, const ConfigValue& value, const ModelFamily& family) {
  const auto refuse = [&](const char* key, const AttributeValue& found) {
    errors.add("'{}' is {}, which means another decoder than the model_type {}", key,
               to_string(found), family.name);
  };
  const AttributeValue used = value("use_sliding_window"), types = value("layer_types");
  if (!is_neutral(used, 0) && is_given(used)) refuse("use_sliding_window", used);
  if (family.windows == Windows::all && is_given(used)) refuse("use_sliding_window", used);
  if (family.windows == Windows::all && is_given(types)) refuse("layer_types", types);
  const AttributeValue window = value("sliding_window");
  if (family.windows == Windows::none && is_absent(used) && window_of(errors, window, 0) > 0)
    refuse("sliding_window", window);
}

/// Sets the windows of the layers from a config.json.
void read_windows(ConfigErrors& errors, const ConfigValue& value, const ModelFamily& family,
                  ModelConfig& config) {
  constexpr int64_t usual_window = 4096, usual_first_layer = 28;
  const bool always = family.windows == Windows::all;
  if (always || family.windows == Windows::none) refuse_windows(errors, value, family);
  const bool used = always || (family.windows != Windows::none &&
                               flag(errors, "use_sliding_window", value("use_sliding_window")));
  const int64_t usual = family.windows == Windows::no_rope ? 0 : usual_window;
  const int64_t window = used ? window_of(errors, value("sliding_window"), usual) : 0;
  const int64_t first =
      number_of(errors, "max_window_layers", value("max_window_layers"), 0, usual_first_layer);
  if (const AttributeValue types = value("layer_types"); is_given(types)) {
    read_layer_types(errors, types, window, family.recurrent, config);
    return;
  }
  for (int64_t l = 0; l < std::ssize(config.layer_kinds); ++l) {
    LayerKind& kind = config.layer_kinds[l];
    if (family.windows == Windows::no_rope ? kind.rotary : !always && l < first) continue;
    kind.window = window;
  }
}

/// Sets which layers are recurrent if there is no 'layer_types'. Adds an error for biases of
/// attention.
void read_recurrence(ConfigErrors& errors, const ConfigValue& value, ModelConfig& config) {
  constexpr const char* key = "full_attention_interval";
  const int64_t interval = number_of(errors, key, value(key), 1, 4);
  for (int64_t l = 0; l < std::ssize(config.layer_kinds) && !is_given(value("layer_types")); ++l)
    config.layer_kinds[l].recurrent = (l + 1) % interval != 0;
  if (config.output_bias)
    errors.add("'attention_bias' is {}; an output gate cannot have biases",
               to_string(value("attention_bias")));
}

/// Adds an error if layers have experts.
void refuse_experts(ConfigErrors& errors, const ConfigValue& value, const ModelFamily& family,
                    const ModelConfig& config) {
  const int64_t experts = number_of(errors, "num_experts", value("num_experts"), 0, family.experts);
  const int64_t step = number_of(errors, "decoder_sparse_step", value("decoder_sparse_step"), 1, 1);
  const AttributeValue listed = value("mlp_only_layers");
  const auto* text = std::get_if<std::string>(&listed);
  std::vector<int64_t> dense;
  try {
    if (is_given(listed)) parse_json("", text == nullptr ? "" : *text, "").get_to(dense);
  } catch (const std::exception&) {
    errors.add("'mlp_only_layers' is {}; wanted: a list of layers", to_string(listed));
  }
  for (int64_t l = 0; l < config.num_hidden_layers && experts > 0; ++l)
    if ((l + 1) % step == 0 && std::ranges::count(dense, l) == 0) {
      errors.add(
          "layer {} has experts, which are not supported; 'num_experts' is {}, "
          "'decoder_sparse_step' {}, 'mlp_only_layers' {}",
          l, experts, step, is_given(listed) ? to_string(listed) : "[]");
      return;
    }
}

/// check_decoder_keys() refuses other values.
void read_activation(const AttributeValue& value, ModelConfig& config) {
  for (const auto& [name, activation] : activations)
    if (value == AttributeValue(std::string(name))) config.hidden_act = activation;
}

void read_soft_cap(ConfigErrors& errors, const AttributeValue& value, ModelConfig& config) {
  if (is_absent(value) || is_neutral(value, 0)) return;
  const auto* whole = std::get_if<int64_t>(&value);
  const auto* real = std::get_if<double>(&value);
  if (whole != nullptr) config.final_soft_cap = static_cast<double>(*whole);
  if (real != nullptr) config.final_soft_cap = *real;
  if (!(config.final_soft_cap > 0) || !std::isfinite(config.final_soft_cap))
    errors.add("'final_logit_softcapping' is {}; wanted: a number above 0", to_string(value));
}

/// Gives each layer a kind of its own, which the caller sets.
void give_each_layer_a_kind(ModelConfig& config) {
  constexpr int64_t most_layers = 1 << 14;  // the limit in check_config()
  config.layer_kinds.assign(std::clamp<int64_t>(config.num_hidden_layers, 0, most_layers), {});
}
/// Removes the kinds of the layers if all are the default.
void forget_if_alike(ModelConfig& config) {
  if (std::ranges::all_of(config.layer_kinds, [](const LayerKind& k) { return k == LayerKind(); }))
    config.layer_kinds.clear();
}

}  // namespace

const ModelFamily* find_family(const AttributeValue& model_type) {
  if (is_absent(model_type)) return std::begin(families);
  const auto* name = std::get_if<std::string>(&model_type);
  const auto found = std::ranges::find_if(
      families, [&](const ModelFamily& family) { return name != nullptr && *name == family.name; });
  return found == std::end(families) ? nullptr : found;
}

std::vector<std::string> activation_names() {
  std::vector<std::string> names;
  for (const auto& [name, activation] : activations) names.emplace_back(name);
  return names;
}

std::string family_names() {
  std::vector<std::string> names;
  for (const ModelFamily& family : families) names.emplace_back(family.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

void read_features(ConfigErrors& errors, const ConfigValue& value, const ModelFamily& family,
                   ModelConfig& config) {
  const bool biases = flag(errors, "attention_bias", value("attention_bias"));
  if (biases && !family.reads_attention_bias)
    errors.add("'attention_bias' is {}, which the model_type {} does not read",
               to_string(value("attention_bias")), family.name);
  config.qkv_bias = family.qkv_bias || biases;
  config.output_bias = biases;
  config.qk_norm = family.qk_norm;
  config.output_gate = family.recurrent;
  const AttributeValue gate = value("attn_output_gate");
  if (is_given(gate) && flag(errors, "attn_output_gate", gate) != config.output_gate)
    errors.add("'attn_output_gate' is {}, which means another decoder; wanted: {}, or leave it out",
               to_string(gate), config.output_gate ? "true" : "0 or false");
  read_activation(value("hidden_act"), config);
  give_each_layer_a_kind(config);
  const AttributeValue listed = value("no_rope_layers");
  const AttributeValue interval = value("no_rope_layer_interval");
  const int64_t stride =
      number_of(errors, "no_rope_layer_interval", interval, 1, family.no_rope_interval);
  if (family.no_rope_interval == 0) {
    for (const auto& [key, found] :
         {std::pair("no_rope_layers", listed), std::pair("no_rope_layer_interval", interval)})
      if (is_given(found))
        errors.add("the key '{}' is not known for the model_type {}", key, family.name);
  } else if (is_given(listed)) {
    read_no_rope_layers(errors, listed, config);
  } else {
    for (size_t l = stride - 1; l < config.layer_kinds.size(); l += stride)
      config.layer_kinds[l].rotary = false;
  }
  if (family.recurrent) read_recurrence(errors, value, config);
  if (family.experts > 0) refuse_experts(errors, value, family, config);
  read_windows(errors, value, family, config);
  forget_if_alike(config);
}

void read_feature_attributes(ConfigErrors& errors, const ConfigValue& value, ModelConfig& config) {
  const auto set = [&](const char* key) { return flag(errors, key, value(key)); };
  config.output_bias = set("attention_bias");
  config.qkv_bias = set("qkv_bias") || config.output_bias;
  config.qk_norm = set("qk_norm");
  config.output_gate = set("attn_output_gate");
  config.tied_head = set("tie_word_embeddings");
  read_soft_cap(errors, value("final_logit_softcapping"), config);
  config.attention_sinks = set("attention_sinks");
  read_activation(value("hidden_act"), config);
  give_each_layer_a_kind(config);
  if (const AttributeValue listed = value("no_rope_layers"); !is_absent(listed))
    read_no_rope_layers(errors, listed, config);
  const AttributeValue used = value("use_sliding_window");
  const bool is_off = !is_absent(used) && is_neutral(used, 0);
  const int64_t window = is_off ? 0 : window_of(errors, value("sliding_window"), 0);
  if (!is_absent(used) && !is_off && window == 0)
    errors.add("'use_sliding_window' is {}, but there is no 'sliding_window'", to_string(used));
  if (const AttributeValue types = value("layer_types"); !is_absent(types))
    read_layer_types(errors, types, window, true, config);
  else
    for (LayerKind& kind : config.layer_kinds) kind.window = window;
  forget_if_alike(config);
}

void check_family(ConfigErrors& errors, const AttributeValue& model_type,
                  const ModelConfig& config) {
  const ModelFamily* family = find_family(model_type);
  if (family == nullptr) {
    errors.add("'model_type' is {}, which means another decoder; wanted: {}, or leave it out",
               to_string(model_type), family_names());
    return;
  }
  const auto want = [&](bool lacks, const char* attribute) {
    if (lacks)
      errors.add("'model_type' is {}, which wants the attribute '{}'", to_string(model_type),
                 attribute);
  };
  want(family->qkv_bias && !config.qkv_bias, "qkv_bias");
  want(family->qk_norm && !config.qk_norm, "qk_norm");
  want(family->recurrent && !config.output_gate, "attn_output_gate");
  want(family->no_rope_interval > 0 && config.layer_kinds.empty(), "no_rope_layers");
}

std::vector<std::pair<std::string, AttributeValue>> feature_values(const ModelConfig& config) {
  std::vector<std::pair<std::string, AttributeValue>> values;
  const auto add = [&](const char* key, bool wanted, const AttributeValue& value) {
    if (wanted) values.emplace_back(key, value);
  };
  for (const auto& [name, activation] : activations)
    if (activation == config.hidden_act) {
      add("hidden_act", activation != GateActivation::silu, std::string(name));
      break;
    }
  add("attention_bias", config.output_bias, int64_t{1});
  add("qkv_bias", config.qkv_bias && !config.output_bias, int64_t{1});
  add("qk_norm", config.qk_norm, int64_t{1});
  add("attn_output_gate", config.output_gate, int64_t{1});
  add("tie_word_embeddings", config.tied_head, int64_t{1});
  add("attention_sinks", config.attention_sinks, int64_t{1});
  add("final_logit_softcapping", config.final_soft_cap > 0, config.final_soft_cap);
  Json turns = Json::array(), types = Json::array();
  int64_t window = 0, sliding = 0;
  for (const LayerKind& kind : config.layer_kinds) {
    turns.push_back(kind.rotary ? 1 : 0);
    types.push_back(kind.recurrent    ? "linear_attention"
                    : kind.window > 0 ? "sliding_attention"
                                      : "full_attention");
    window = std::max(window, kind.window);
    sliding += kind.window > 0 ? 1 : 0;
  }
  const auto turning = [](const LayerKind& kind) { return kind.rotary; };
  add("no_rope_layers", !std::ranges::all_of(config.layer_kinds, turning), dump_json(turns));
  add("sliding_window", window > 0, window);
  const bool recurs = config.recurrent_layers() > 0;
  add("layer_types", recurs || (sliding > 0 && sliding < config.num_hidden_layers),
      dump_json(types));
  for (const auto& [name, member, most] : recurrent_sizes)
    add(name, recurs, config.recurrent.*member);
  return values;
}

}  // namespace gyre
