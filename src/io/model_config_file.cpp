#include "io/model_config_file.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "core/index.hpp"
#include "core/json.hpp"
#include "io/decoder_keys.hpp"
#include "io/model_file.hpp"
#include "io/resources.hpp"

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
  int64_t whole(const char* key) const {
    if (!given(key)) throw_usage("{} lacks '{}'", path_, key);
    if (const std::optional<int64_t> number = whole_number(json_[key])) return *number;
    throw_usage("{}: '{}' is {}; wanted: a whole number", path_, key, shown_json(json_[key]));
  }
  int64_t whole_or(const char* key, int64_t usual) const { return given(key) ? whole(key) : usual; }

 private:
  bool given(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }

  const std::string& path_;
  const Json& json_;
};

}  // namespace

ModelConfig parse_model_config(const std::string& path, const std::string& text) {
  const Json json = parse_json(path, text, "a config.json");
  const Config file(path, json);
  ModelConfig c;
  c.vocab_size = file.whole("vocab_size");
  c.hidden_size = file.whole("hidden_size");
  c.num_hidden_layers = file.whole("num_hidden_layers");
  c.num_attention_heads = file.whole("num_attention_heads");
  c.num_key_value_heads = file.whole_or("num_key_value_heads", c.num_attention_heads);
  c.head_dim =
      file.whole_or("head_dim", c.hidden_size / std::max<int64_t>(1, c.num_attention_heads));
  c.intermediate_size = file.whole("intermediate_size");
  // These do not affect the time.
  c.rope_theta = 1e4;
  c.rms_norm_eps = 1e-5;
  constexpr int64_t padding = 128;
  c.vocab_padded = round_up(std::clamp<int64_t>(c.vocab_size, 1, INT32_MAX), padding);
  ConfigErrors errors;
  check_config(errors, c);
  check_decoder_keys(errors, c, true, [&](const std::string& key) { return file.value(key); });
  errors.throw_if_any(path);
  return c;
}

ModelConfig read_model_config(Communicator& comm, const std::string& path) {
  if (!path.ends_with(".json")) return ModelFile(comm, path).config();
  return parse_model_config(path, read_text_file(path, "a config.json"));
}

}  // namespace gyre
