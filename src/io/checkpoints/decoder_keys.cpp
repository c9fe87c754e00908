#include "io/checkpoints/decoder_keys.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/nearest.hpp"
#include "io/checkpoints/model_features.hpp"
#include "io/schemas/schema_names.hpp"

namespace gyre {
namespace {

using h5::AttributeValue;

/// A key, and which of its values agree with this decoder. `layers`: it changes a layer's time.
struct DecoderKey {
  const char* name;
  std::string wanted;
  std::function<bool(const AttributeValue&, const ModelConfig&)> is_ours;
  bool layers = false;
};

DecoderKey number(const char* name, double neutral, bool layers = false) {
  return {name, neutral == 0 ? "0 or false" : fmt::format("{}", neutral),
          [neutral](const AttributeValue& value, const ModelConfig&) {
            return is_neutral(value, neutral);
          },
          layers};
}

DecoderKey text(const char* name, const std::vector<std::string>& ours, bool layers = false) {
  return {name, fmt::format("{}", fmt::join(ours, " or ")),
          [ours](const AttributeValue& value, const ModelConfig&) {
            const auto* found = std::get_if<std::string>(&value);
            return found != nullptr && std::find(ours.begin(), ours.end(), *found) != ours.end();
          },
          layers};
}

/// A key that repeats a number of the configuration.
DecoderKey same(const char* name, const char* wanted, double (*value)(const ModelConfig&)) {
  return {name, wanted, [value](const AttributeValue& found, const ModelConfig& config) {
            const auto* whole = std::get_if<int64_t>(&found);
            const auto* real = std::get_if<double>(&found);
            const double wanted_value = value(config);
            if (whole != nullptr) return static_cast<double>(*whole) == wanted_value;
            if (real != nullptr) return std::abs(*real - wanted_value) <= 1e-6 * wanted_value;
            return is_neutral(found, NAN);
          }};
}

const std::vector<DecoderKey>& keys() {
  static const std::vector<DecoderKey> all{
      number("attention_chunk_size", 0, true),
      number("use_qk_norm", 0, true),
      number("num_local_experts", 0, true),
      number("num_experts", 0, true),
      number("n_routed_experts", 0, true),
      number("kv_lora_rank", 0, true),
      text("rope_type", {"default", "none"}),
      number("rope_interleaved", 0),
      number("use_mrope", 0),
      text("hidden_act", activation_names()),
      number("mlp_bias", 0),
      same("query_pre_attn_scalar", "head_dim",
           [](const ModelConfig& c) { return static_cast<double>(c.head_dim); }),
      same("attention_multiplier", "1 / sqrt(head_dim)",
           [](const ModelConfig& c) { return 1 / std::sqrt(c.head_dim); }),
      same("final_logit_softcapping", "0", [](const ModelConfig& c) { return c.final_soft_cap; }),
      number("attn_logit_softcapping", 0),
      number("logit_scale", 1),
      number("logits_scaling", 1),
      number("residual_multiplier", 1),
      number("embedding_multiplier", 1),
  };
  return all;
}

}  // namespace

std::vector<std::string> decoder_keys() {
  std::vector<std::string> names;
  for (const DecoderKey& key : keys()) names.emplace_back(key.name);
  return names;
}

void check_decoder_keys(ConfigErrors& errors, const ModelConfig& config, bool only_layers,
                        const std::function<AttributeValue(const std::string&)>& value) {
  for (const DecoderKey& key : keys()) {
    const AttributeValue found = value(key.name);
    if (found == AttributeValue() || (only_layers && !key.layers)) continue;
    if (!key.is_ours(found, config))
      errors.add("'{}' is {}, which means another decoder; wanted: {}, or leave it out", key.name,
                 to_string(found), key.wanted);
  }
}

void check_ignored_keys(ConfigErrors& errors, const std::vector<std::string>& ignored,
                        const std::vector<std::string>& names, const std::set<std::string>& read) {
  for (const std::string& key : ignored) {
    if (read.contains(key)) errors.add("--ignore-key {}: this key is read", key);
    if (read.contains(key) || std::ranges::count(names, key) > 0) continue;
    const auto inner = std::ranges::find_if(
        names, [&](const std::string& name) { return name.ends_with("." + key); });
    const std::string near = inner == names.end() ? nearest(key, names) : *inner;
    errors.add("--ignore-key {}: the configuration has no such key; {}", key,
               near.empty() ? fmt::format("it has {}", fmt::join(names, ", "))
                            : "nearest: '" + near + "'");
  }
}

}  // namespace gyre
