#include "io/checkpoints/model_config_file.hpp"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.hpp"
#include "core/index.hpp"
#include "core/json.hpp"
#include "io/checkpoints/decoder_keys.hpp"
#include "io/checkpoints/model_features.hpp"
#include "io/checkpoints/rope_keys.hpp"
#include "io/resources.hpp"
#include "io/schemas/model_file.hpp"

namespace gyre {
namespace {

class Config {
 public:
  Config(const std::string& path, const Json& json) : path_(path), json_(json) {
    if (!json.is_object()) throw_usage("{}: no JSON object; wanted: a config.json", path);
    if (given("text_config"))
      throw_usage("{}: 'text_config' means a model of several parts; wanted: one decoder", path);
  }

  /// Value of a key in the form of an HDF5 attribute.
  h5::AttributeValue value(const std::string& key) const {
    if (!given(key.c_str())) return {};
    const Json& found = json_[key];
    if (found.is_boolean()) return found.get<bool>();
    if (const std::optional<int64_t> number = whole_number(found)) return *number;
    if (found.is_number()) return found.get<double>();
    return found.is_string() ? found.get<std::string>() : dump_json(found);
  }
  /// As value(), with the text "null" for a key that is there as null.
  h5::AttributeValue value_or_null(const std::string& key) const {
    return json_.contains(key) && json_[key].is_null() ? h5::AttributeValue(std::string("null"))
                                                       : value(key);
  }
  int64_t whole(const char* key) const {
    if (!given(key)) throw_usage("{} lacks '{}'", path_, key);
    if (const std::optional<int64_t> number = whole_number(json_[key])) return *number;
    throw_usage("{}: '{}' is {}; wanted: a whole number", path_, key, shown_json(json_[key]));
  }
  int64_t whole_or(const char* key, int64_t usual) const { return given(key) ? whole(key) : usual; }
  double real_or(const char* key, double usual) const {
    if (!given(key)) return usual;
    if (json_[key].is_number()) return json_[key].get<double>();
    throw_usage("{}: '{}' is {}; wanted: a number", path_, key, shown_json(json_[key]));
  }
  bool flag_or(const char* key, bool usual) const {
    if (!given(key)) return usual;
    if (json_[key].is_boolean()) return json_[key].get<bool>();
    throw_usage("{}: '{}' is {}; wanted: true or false", path_, key, shown_json(json_[key]));
  }
  /// Names of all keys, and of those inside objects as "OBJECT.KEY".
  std::vector<std::string> keys_and_inner() const {
    std::vector<std::string> names;
    for (const auto& [key, value] : json_.items()) {
      names.push_back(key);
      if (!value.is_object()) continue;
      for (const auto& [inner, of_inner] : value.items()) names.push_back(key + "." + inner);
    }
    return names;
  }
  /// Names of the keys whose value is not null.
  std::vector<std::string> keys() const {
    std::vector<std::string> names;
    for (const auto& [key, value] : json_.items())
      if (!value.is_null()) names.push_back(key);
    return names;
  }

 private:
  bool given(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }

  const std::string& path_;
  const Json& json_;
};

const ModelFamily& family_of(const Config& file, const std::string& path) {
  const h5::AttributeValue type = file.value("model_type");
  const ModelFamily* family = find_family(type);
  if (family == nullptr)
    throw_usage("{}: 'model_type' is {}; models that can be computed are {}", path, to_string(type),
                family_names());
  return *family;
}

ModelConfig shape_of(const Config& file, const ModelFamily& family) {
  ModelConfig c;
  c.vocab_size = file.whole("vocab_size");
  c.hidden_size = file.whole("hidden_size");
  c.num_hidden_layers = file.whole("num_hidden_layers");
  c.num_attention_heads = file.whole("num_attention_heads");
  const bool is_null =
      file.value_or_null("num_key_value_heads") == h5::AttributeValue(std::string("null"));
  c.num_key_value_heads =
      file.whole_or("num_key_value_heads",
                    family.kv_heads > 0 && !is_null ? family.kv_heads : c.num_attention_heads);
  const int64_t share = c.hidden_size / std::max<int64_t>(1, c.num_attention_heads);
  c.head_dim = file.whole_or("head_dim", family.head_dim > 0 ? family.head_dim : share);
  c.intermediate_size = file.whole("intermediate_size");
  if (family.recurrent)
    for (const auto& [name, member, most] : recurrent_sizes) c.recurrent.*member = file.whole(name);
  c.tied_head = file.flag_or("tie_word_embeddings", family.tied_head);
  constexpr int64_t padding = 128;
  c.vocab_padded = round_up(std::clamp<int64_t>(c.vocab_size, 1, INT32_MAX), padding);
  return c;
}

/// The share of a head's elements that rotate if no key gives one.
std::optional<double> usual_share(const ModelFamily& family) {
  return family.recurrent ? std::optional(0.25) : std::nullopt;
}

/// `own`: the family's own keys, which read_features() has checked.
void check(const Config& file, const ModelConfig& config, bool only_layers, ConfigErrors& errors,
           const std::string& path, const std::set<std::string>& own) {
  check_config(errors, config);
  check_decoder_keys(errors, config, only_layers, [&](const std::string& key) {
    return own.contains(key) ? h5::AttributeValue() : file.value(key);
  });
  errors.throw_if_any(path);
}

/// Keys that no other family has.
std::set<std::string> own_keys(const ModelFamily& family) {
  std::set<std::string> own;
  if (family.recurrent) own.insert(std::begin(recurrent_keys), std::end(recurrent_keys));
  if (family.experts > 0) own.insert(std::begin(expert_keys), std::end(expert_keys));
  return own;
}

constexpr double usual_norm_eps = 1e-6;  // the default of transformers

constexpr const char* read_keys[] = {
    "vocab_size",          "hidden_size",         "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size",   "rms_norm_eps",        "tie_word_embeddings"};

/// Keys that change no log-probability of a given text and given weights.
constexpr const char* harmless_keys[] = {"_name_or_path",          "architectures",
                                         "attention_dropout",      "auto_map",
                                         "bos_token_id",           "dtype",
                                         "eos_token_id",           "initializer_range",
                                         "is_llama_config",        "pad_token_id",
                                         "pretraining_tp",         "torch_dtype",
                                         "transformers.js_config", "transformers_version",
                                         "unk_token_id",           "use_cache"};

}  // namespace

ModelConfig parse_model_config(const std::string& path, const std::string& text) {
  const Json json = parse_json(path, text, "a config.json");
  const Config file(path, json);
  const ModelFamily& family = family_of(file, path);
  ModelConfig c = shape_of(file, family);
  c.rms_norm_eps = usual_norm_eps;
  c.rope_theta = family.rope_theta;
  ConfigErrors errors, of_angles;
  read_features(
      errors, [&](const std::string& key) { return file.value_or_null(key); }, family, c);
  const ModelConfig plain = c;
  read_rope(
      of_angles, [&](const std::string& key) { return file.value(key); }, c, nullptr,
      usual_share(family));
  check_rope(of_angles, c);
  // If the RoPE keys have errors, assumes plain RoPE of whole heads.
  if (!of_angles.empty()) c = plain;
  check(file, c, true, errors, path, own_keys(family));
  return c;
}

CheckpointConfig parse_checkpoint_config(const std::string& path, const std::string& text,
                                         const std::vector<std::string>& ignored_keys) {
  const Json json = parse_json(path, text, "a config.json");
  const Config file(path, json);
  const ModelFamily& family = family_of(file, path);
  ModelConfig c = shape_of(file, family);
  c.rms_norm_eps = file.real_or("rms_norm_eps", usual_norm_eps);
  std::set<std::string> known(std::begin(read_keys), std::end(read_keys));
  known.insert(std::begin(rope_keys), std::end(rope_keys));
  known.insert(std::begin(feature_keys), std::end(feature_keys));
  const std::set<std::string> own = own_keys(family);
  known.insert(own.begin(), own.end());
  for (const std::string& key : decoder_keys()) known.insert(key);
  ConfigErrors errors;
  check_ignored_keys(errors, ignored_keys, file.keys_and_inner(), known);
  known.insert(std::begin(harmless_keys), std::end(harmless_keys));
  known.insert(ignored_keys.begin(), ignored_keys.end());
  read_features(
      errors, [&](const std::string& key) { return file.value_or_null(key); }, family, c);
  c.rope_theta = family.rope_theta;
  std::vector<std::string> unread = ignored_keys;
  if (family.recurrent)  // all three positions of a token of text are the same
    for (const char* object : {"rope_scaling", "rope_parameters"})
      for (const char* key : {"mrope_section", "mrope_interleaved"})
        unread.push_back(fmt::format("{}.{}", object, key));
  read_rope(
      errors, [&](const std::string& key) { return file.value(key); }, c, &unread,
      usual_share(family));
  if (c.rotary_dim != 0 && !family.recurrent)
    errors.add(
        "'partial_rotary_factor' or 'rotary_dim' lets {} of {} elements of a head turn, which the "
        "code of the model_type {} does not read: all turn there",
        c.rotary_dim, c.head_dim, family.name);
  for (const std::string& key : file.keys())
    if (!known.contains(key))
      errors.add("the key '{}' is not known; --ignore-key {} if it changes no result", key, key);
  check(file, c, false, errors, path, own);
  const h5::AttributeValue most = file.value("max_position_embeddings");
  const auto* whole = std::get_if<int64_t>(&most);
  return {c, whole == nullptr ? 0 : std::max<int64_t>(0, *whole), family.recurrent};
}

ModelConfig read_model_config(Communicator& comm, const std::string& path) {
  if (!path.ends_with(".json")) return ModelFile(comm, path).config();
  return parse_model_config(path, read_text_file(path, "a config.json"));
}

}  // namespace gyre
