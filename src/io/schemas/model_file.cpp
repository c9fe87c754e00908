#include "io/schemas/model_file.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <tuple>

#include "comm/agree.hpp"
#include "io/checkpoints/decoder_keys.hpp"
#include "io/checkpoints/model_features.hpp"
#include "io/checkpoints/rope_keys.hpp"

namespace gyre {
namespace {

constexpr const char* group = "/model";

/// Types of stored weights, from wide to narrow.
constexpr std::array weight_types = {h5::Type::f32, h5::Type::float16, h5::Type::bfloat16};

ModelConfig read_config(SchemaReader& reader, const h5::File& file) {
  ModelConfig config;
  config.vocab_size = reader.integer(group, "vocab_size");
  config.vocab_padded = reader.integer(group, "vocab_padded");
  config.hidden_size = reader.integer(group, "hidden_size");
  config.num_hidden_layers = reader.integer(group, "num_hidden_layers");
  config.num_attention_heads = reader.integer(group, "num_attention_heads");
  config.num_key_value_heads = reader.integer(group, "num_key_value_heads");
  config.head_dim = reader.integer(group, "head_dim");
  config.intermediate_size = reader.integer(group, "intermediate_size");
  config.rope_theta = reader.real(group, "rope_theta");
  config.rms_norm_eps = reader.real(group, "rms_norm_eps");
  const auto value = [&](const std::string& key) { return file.attribute(group, key); };
  if (reader.errors().empty()) read_rope(reader.errors(), value, config);
  if (reader.errors().empty()) read_feature_attributes(reader.errors(), value, config);
  if (config.recurrent_layers() > 0)
    for (const auto& [name, member, most] : recurrent_sizes)
      config.recurrent.*member = reader.integer(group, name);
  return config;
}

/// Adds errors for tensors that this decoder does not read and attributes that it does not support.
void check_nothing_else(SchemaReader& reader, const h5::File& file, const ModelConfig& config) {
  const auto value = [&](const std::string& key) { return file.attribute(group, key); };
  check_decoder_keys(reader.errors(), config, false, value);
  check_family(reader.errors(), value("model_type"), config);
  std::set<std::string> known;
  for (const auto& [name, shape] : model_tensors(config)) known.insert(name);
  for (const std::string& name : file.datasets_below(group))
    if (!known.contains(name))
      reader.errors().add(
          "dataset '{}/{}' is none of this decoder's tensors ({} layers{}{}{}{}{}{})", group, name,
          config.num_hidden_layers, config.qkv_bias ? "" : " without qkv_bias",
          config.output_bias ? "" : ", without attention_bias",
          config.qk_norm ? "" : ", without qk_norm",
          config.attention_sinks ? "" : ", without attention_sinks",
          config.output_gate ? "" : ", without attn_output_gate",
          config.tied_head ? ", with tie_word_embeddings" : "");
}

std::vector<std::string> attributes_of_decoders() {
  std::vector<std::string> places;
  for (const std::string& key : decoder_keys()) places.push_back(fmt::format("{}@{}", group, key));
  for (const char* key : rope_keys) places.push_back(fmt::format("{}@{}", group, key));
  for (const char* key : feature_attributes) places.push_back(fmt::format("{}@{}", group, key));
  for (const auto& [name, member, most] : recurrent_sizes)
    places.push_back(fmt::format("{}@{}", group, name));
  places.push_back(fmt::format("{}@model_type", group));
  return places;
}

h5::Type wider_of(h5::Type a, h5::Type b) {
  const auto place = [](h5::Type type) { return std::ranges::find(weight_types, type); };
  return *std::min(place(a), place(b));
}

/// Checks all tensors; returns the widest type of the matrices.
h5::Type check_tensors(SchemaReader& reader, const ModelConfig& config) {
  const std::vector<h5::Type> types(weight_types.begin(), weight_types.end());
  h5::Type widest = weight_types.back();
  // A wrong number of layers could list enough tensors to fill memory: check the last one first.
  const std::string last = layer_tensor(config.num_hidden_layers - 1, "attn_norm");
  reader.dataset(fmt::format("{}/{}", group, last), types, {config.hidden_size});
  reader.throw_if_any();
  for (const auto& [name, shape] : model_tensors(config)) {
    const auto dataset = reader.dataset(fmt::format("{}/{}", group, name), types, shape);
    if (dataset && shape.size() == 2) widest = wider_of(widest, dataset->type());
  }
  return widest;
}

ModelConfig read_and_check(const h5::File& file, std::string& tokenizer, int64_t& longest_text,
                           h5::Type& widest) {
  SchemaReader reader(file, model_schema);
  const ModelConfig config = read_config(reader, file);
  tokenizer = reader.text(group, "tokenizer", "");
  longest_text = reader.integer(group, "max_position_embeddings", 0);
  if (reader.errors().empty()) check_config(reader.errors(), config);
  reader.throw_if_any();  // a wrong configuration would make all shapes wrong
  widest = check_tensors(reader, config);
  check_nothing_else(reader, file, config);
  reader.throw_if_any();
  return config;
}

/// Throws a usage error that names the first NaN or infinity of the values read from `slab`.
void check_finite(const Buffer<float>& values, const h5::Dataset& dataset, const h5::Slab& slab) {
  for (int64_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    h5::Shape place = slab.start;
    place.back() += i % slab.count.back();
    if (place.size() == 2) place[0] += i / slab.count.back();
    throw_usage("'{}': {}{} is {}; weights must be finite", dataset.file(), dataset.path(),
                h5::to_string(place), values[i]);
  }
}

}  // namespace

namespace {

void check_recurrent(ConfigErrors& errors, const RecurrentConfig& r) {
  for (const auto& [name, member, most] : recurrent_sizes) {
    if (r.*member < 1) errors.add("{} is {}; it must be at least 1", name, r.*member);
    if (r.*member > most) errors.add("{} is {}; it must be at most {}", name, r.*member, most);
  }
  if (r.key_heads > 0 && r.value_heads % r.key_heads != 0)
    errors.add("linear_num_value_heads is {}; it must be a multiple of linear_num_key_heads = {}",
               r.value_heads, r.key_heads);
}

}  // namespace

void check_config(ConfigErrors& errors, const ModelConfig& c) {
  // With these limits, all parameters, and the activations of max_slots, take less than 2^62 bytes.
  const std::tuple<const char*, int64_t, int64_t> sizes[] = {
      {"vocab_size", c.vocab_size, 1 << 24},
      {"vocab_padded", c.vocab_padded, 1 << 24},
      {"hidden_size", c.hidden_size, 1 << 20},
      {"num_hidden_layers", c.num_hidden_layers, 1 << 14},
      {"num_attention_heads", c.num_attention_heads, 1 << 12},
      {"num_key_value_heads", c.num_key_value_heads, 1 << 12},
      {"head_dim", c.head_dim, 1 << 10},
      {"intermediate_size", c.intermediate_size, 1 << 22},
  };
  for (const auto& [name, value, most] : sizes) {
    if (value < 1) errors.add("{} is {}; it must be at least 1", name, value);
    if (value > most) errors.add("{} is {}; it must be at most {}", name, value, most);
  }
  if (c.vocab_padded < c.vocab_size)
    errors.add("vocab_padded is {}; it must be at least vocab_size = {}", c.vocab_padded,
               c.vocab_size);
  if (c.num_key_value_heads > 0 && c.num_attention_heads % c.num_key_value_heads != 0)
    errors.add("num_attention_heads is {}; it must be a multiple of num_key_value_heads = {}",
               c.num_attention_heads, c.num_key_value_heads);
  if (c.head_dim % 2 != 0)
    errors.add("head_dim is {}; it must be even, since rotary embedding turns pairs", c.head_dim);
  check_rope(errors, c);
  if (c.recurrent_layers() > 0) check_recurrent(errors, c.recurrent);
  if (!(c.rms_norm_eps >= 0) || !std::isfinite(c.rms_norm_eps))
    errors.add("rms_norm_eps is {}; it must not be negative", c.rms_norm_eps);
}

std::string layer_tensor(int64_t layer, const std::string& name) {
  return fmt::format("layers/{}/{}", layer, name);
}

namespace {

using LayerTensors = std::vector<std::pair<const char*, h5::Shape>>;

LayerTensors attention_tensors(const ModelConfig& c) {
  const int64_t q = c.query_width(), kv = c.kv_width();
  LayerTensors all{
      {"wq", {c.hidden_size, q}}, {"wk", {c.hidden_size, kv}}, {"wv", {c.hidden_size, kv}}};
  const auto add = [&](bool wanted, const LayerTensors& more) {
    if (wanted) all.insert(all.end(), more.begin(), more.end());
  };
  add(c.qkv_bias, {{"bq", {q}}, {"bk", {kv}}, {"bv", {kv}}});
  add(c.qk_norm, {{"q_norm", {c.head_dim}}, {"k_norm", {c.head_dim}}});
  add(c.attention_sinks, {{"sinks", {c.num_attention_heads}}});
  add(c.output_gate, {{"wz", {c.hidden_size, q}}});
  add(true, {{"wo", {q, c.hidden_size}}});
  add(c.output_bias, {{"bo", {c.hidden_size}}});
  return all;
}

LayerTensors recurrent_tensors(const ModelConfig& c) {
  const RecurrentConfig& r = c.recurrent;
  const int64_t keys = r.key_width(), values = r.value_width();
  return {{"wq", {c.hidden_size, keys}},          {"wk", {c.hidden_size, keys}},
          {"wv", {c.hidden_size, values}},        {"wz", {c.hidden_size, values}},
          {"wb", {c.hidden_size, r.value_heads}}, {"wa", {c.hidden_size, r.value_heads}},
          {"conv_q", {r.conv_width, keys}},       {"conv_k", {r.conv_width, keys}},
          {"conv_v", {r.conv_width, values}},     {"a_log", {r.value_heads}},
          {"dt_bias", {r.value_heads}},           {"o_norm", {r.value_dim}},
          {"wo", {values, c.hidden_size}}};
}

}  // namespace

std::vector<std::pair<std::string, h5::Shape>> model_tensors(const ModelConfig& c) {
  std::vector<std::pair<std::string, h5::Shape>> tensors{
      {"embed", {c.vocab_padded, c.hidden_size}},
      {"final_norm", {c.hidden_size}},
  };
  if (!c.tied_head) tensors.push_back({"head", {c.hidden_size, c.vocab_padded}});
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    const auto add = [&](const char* name, h5::Shape shape) {
      tensors.emplace_back(layer_tensor(layer, name), std::move(shape));
    };
    add("attn_norm", {c.hidden_size});
    for (auto& [name, shape] :
         c.kind_of(layer).recurrent ? recurrent_tensors(c) : attention_tensors(c))
      add(name, std::move(shape));
    add("mlp_norm", {c.hidden_size});
    add("w_gate", {c.hidden_size, c.intermediate_size});
    add("w_up", {c.hidden_size, c.intermediate_size});
    add("w_down", {c.intermediate_size, c.hidden_size});
  }
  return tensors;
}

ModelFile::ModelFile(Communicator& comm, const std::string& path)
    : comm_(comm), file_(open_schema_file(comm, path, model_schema, attributes_of_decoders())) {
  run_agreed(comm_, "checking the model " + path,
             [&] { config_ = read_and_check(file_, tokenizer_, longest_text_, widest_); });
}

Buffer<float> ModelFile::read_matrix(const std::string& name, int64_t row_begin, int64_t row_count,
                                     int64_t col_begin, int64_t col_count) {
  const std::string path = fmt::format("{}/{}", group, name);
  h5::Slab slab{{row_begin, col_begin}, {row_count, col_count}};
  std::optional<h5::Dataset> dataset;
  run_agreed(comm_, "opening " + path, [&] {
    dataset = file_.dataset(path);
    if (dataset->shape().size() != 1) return;
    GYRE_CHECK(row_begin == 0 && row_count <= 1, "{} is one row", path);
    slab = {{col_begin}, {row_count * col_count}};
  });
  Buffer<float> values;
  dataset->make_room(row_count * col_count, sizeof(float),
                     [&] { values = Buffer<float>(row_count * col_count); });
  dataset->read<float>(std::span(&slab, 1), values.span());
  run_agreed(comm_, "checking " + path, [&] { check_finite(values, *dataset, slab); });
  return values;
}

Buffer<float> ModelFile::read_vector(const std::string& name) {
  for (const auto& [tensor, shape] : model_tensors(config_))
    if (tensor == name) return read_matrix(name, 0, 1, 0, shape[0]);
  throw_runtime("the model '{}' has no tensor '{}'", file_.path(), name);
}

}  // namespace gyre
