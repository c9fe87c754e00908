// Hugging Face's folders: config.json and safetensors files. A safetensors file is a 64-bit length,
// a JSON object of that length, and the bytes of all tensors:
// https://huggingface.co/docs/safetensors

#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <system_error>
#include <utility>

#include "core/error.hpp"
#include "core/json.hpp"
#include "io/checkpoints/checkpoint.hpp"
#include "io/checkpoints/model_config_file.hpp"
#include "io/checkpoints/tokenizer_file.hpp"
#include "io/resources.hpp"

namespace gyre {
namespace {

constexpr std::pair<const char*, const char*> hugging_face_in_layer[] = {
    {"input_layernorm.weight", "attn_norm"},
    {"self_attn.q_proj.weight", "wq"},
    {"self_attn.k_proj.weight", "wk"},
    {"self_attn.v_proj.weight", "wv"},
    {"self_attn.q_proj.bias", "bq"},
    {"self_attn.k_proj.bias", "bk"},
    {"self_attn.v_proj.bias", "bv"},
    {"self_attn.q_norm.weight", "q_norm"},
    {"self_attn.k_norm.weight", "k_norm"},
    {"self_attn.o_proj.weight", "wo"},
    {"self_attn.o_proj.bias", "bo"},
    {"linear_attn.in_proj_z.weight", "wz"},
    {"linear_attn.in_proj_b.weight", "wb"},
    {"linear_attn.in_proj_a.weight", "wa"},
    {"linear_attn.A_log", "a_log"},
    {"linear_attn.dt_bias", "dt_bias"},
    {"linear_attn.norm.weight", "o_norm"},
    {"linear_attn.out_proj.weight", "wo"},
    {"post_attention_layernorm.weight", "mlp_norm"},
    {"mlp.gate_proj.weight", "w_gate"},
    {"mlp.up_proj.weight", "w_up"},
    {"mlp.down_proj.weight", "w_down"}};

/// Tensors of a layer that hold several of ours. Qwen3-Next groups them by key head, Qwen3.5 not.
std::vector<FusedTensor> fused_in_layer(const ModelConfig& config) {
  std::vector<FusedTensor> all;
  if (config.output_gate)
    all.push_back({"self_attn.q_proj.weight",
                   config.num_attention_heads,
                   {{"wq", config.head_dim}, {"wz", config.head_dim}}});
  if (config.recurrent_layers() == 0) return all;
  const RecurrentConfig& r = config.recurrent;
  const int64_t heads = r.value_heads / r.key_heads, values = heads * r.value_dim;
  all.push_back({"linear_attn.in_proj_qkvz.weight",
                 r.key_heads,
                 {{"wq", r.key_dim}, {"wk", r.key_dim}, {"wv", values}, {"wz", values}}});
  all.push_back({"linear_attn.in_proj_ba.weight", r.key_heads, {{"wb", heads}, {"wa", heads}}});
  all.push_back({"linear_attn.in_proj_qkv.weight",
                 1,
                 {{"wq", r.key_width()}, {"wk", r.key_width()}, {"wv", r.value_width()}}});
  all.push_back(
      {"linear_attn.conv1d.weight",
       1,
       {{"conv_q", r.key_width()}, {"conv_k", r.key_width()}, {"conv_v", r.value_width()}}});
  return all;
}

constexpr TensorNames hugging_face = {
    "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.",
    hugging_face_in_layer,       fused_in_layer};

WeightEncoding safetensors_encoding(const std::string& type, const std::string& what) {
  if (type == "F32") return WeightEncoding::f32;
  if (type == "F16") return WeightEncoding::f16;
  if (type == "BF16") return WeightEncoding::bf16;
  throw_usage("{} has type '{}'; types that can be read are F32, F16 and BF16", what, type);
}

/// The value of `key` if it is a list of integers that are not negative, else std::nullopt.
std::optional<std::vector<int64_t>> sizes_of(const Json& entry, const char* key) {
  if (!entry.is_object() || !entry.contains(key) || !entry[key].is_array()) return {};
  std::vector<int64_t> sizes;
  for (const Json& value : entry[key]) {
    const std::optional<int64_t> size = whole_number(value);
    if (!size || *size < 0) return {};
    sizes.push_back(*size);
  }
  return sizes;
}

/// `begin`: where the tensors of the file begin.
StoredTensor tensor_of(const InputFile& file, int64_t begin, const std::string& name,
                       const Json& entry) {
  const std::string what = fmt::format("'{}': the tensor '{}'", file.path(), name);
  const auto shape = sizes_of(entry, "shape"), offsets = sizes_of(entry, "data_offsets");
  if (!shape || !offsets || offsets->size() != 2 || !entry.contains("dtype") ||
      !entry["dtype"].is_string())
    throw_usage("{} lacks its dtype, shape or data_offsets", what);
  const WeightEncoding encoding = safetensors_encoding(entry["dtype"].get<std::string>(), what);
  const double bytes =
      std::accumulate(shape->begin(), shape->end(), static_cast<double>(block_of(encoding).bytes),
                      std::multiplies<>());  // a product of integers may overflow
  if ((*offsets)[1] < (*offsets)[0] || (*offsets)[1] > file.size() - begin)
    throw_usage("{} has the bytes {} to {}; the file has {}", what, (*offsets)[0], (*offsets)[1],
                file.size() - begin);
  if (bytes != (*offsets)[1] - (*offsets)[0])
    throw_usage("{} is {} and has {} bytes; {} are needed", what, h5::to_string(*shape),
                (*offsets)[1] - (*offsets)[0], bytes);
  return {*shape, encoding, &file, begin + (*offsets)[0]};
}

/// Throws unless the tensors, (offset, bytes) of each, follow one another from `begin` to the end.
void check_coverage(const InputFile& file, int64_t begin,
                    std::vector<std::pair<int64_t, int64_t>> parts) {
  std::ranges::sort(parts);
  int64_t end = begin;
  for (const auto& [offset, bytes] : parts) {
    if (offset < end) throw_usage("'{}': two tensors share bytes of the file", file.path());
    if (offset > end)
      throw_usage("'{}': the bytes {} to {} are of no tensor", file.path(), end - begin,
                  offset - begin);
    end = offset + bytes;
  }
  if (end < file.size())
    throw_usage("'{}': {} bytes are behind the last tensor", file.path(), file.size() - end);
}

/// Adds the tensors of the decoder that a file has.
void read_tensors(Checkpoint& checkpoint, const std::string& path) {
  checkpoint.files.push_back(std::make_unique<InputFile>(path));
  const InputFile& file = *checkpoint.files.back();
  constexpr uint64_t most = 100'000'000;  // the limit of the format
  uint64_t length = 0;
  if (file.size() >= static_cast<int64_t>(sizeof(length)))
    file.read(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length == 0 || length > most || length > file.size() - sizeof(length))
    throw_usage("'{}' is no safetensors file, or truncated: a header of {} bytes, a file of {}",
                path, length, file.size());
  std::string text(length, ' ');
  file.read(sizeof(length), std::as_writable_bytes(std::span(text)));
  const Json header = parse_json(path, text, "the header of a safetensors file");
  if (!header.is_object()) throw_usage("'{}': the header is no JSON object", path);
  const auto begin = static_cast<int64_t>(sizeof(length) + length);
  std::vector<std::pair<int64_t, int64_t>> parts;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const StoredTensor tensor = tensor_of(file, begin, name, entry);
    parts.emplace_back(tensor.offset, tensor.bytes());
    if (!name.ends_with(".rotary_emb.inv_freq"))  // it follows from the configuration
      add_tensor(checkpoint, hugging_face, name, tensor);
  }
  check_coverage(file, begin, std::move(parts));
}

/// Files that an index lists.
std::vector<std::string> shards_of(const std::string& folder, const std::string& index) {
  const Json json = parse_json(index, read_text_file(index, "an index of safetensors"),
                               "an index of safetensors");
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object())
    throw_usage("'{}' lacks 'weight_map'", index);
  std::vector<std::string> names;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos)
      throw_usage("'{}': the file of '{}' is {}; wanted: a name in the same folder", index, tensor,
                  shown_json(file));
    names.push_back(folder + "/" + file.get<std::string>());
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

/// Whether a folder has an entry of this name; links that lead nowhere count.
bool has_entry(const std::string& path) {
  std::error_code unreadable;
  return std::filesystem::symlink_status(path, unreadable).type() !=
         std::filesystem::file_type::not_found;
}

/// Throws for a folder that has neither model.safetensors nor an index.
[[noreturn]] void refuse_shards(const std::string& folder) {
  std::error_code unreadable;
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder, unreadable))
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().filename());
  std::ranges::sort(names);
  if (names.empty()) throw_unreadable(folder + "/model.safetensors", ENOENT);
  const std::string more =
      names.size() > 3 ? fmt::format(" and {} more", names.size() - 3) : std::string();
  names.resize(std::min<size_t>(names.size(), 3));
  throw_usage(
      "'{}' has {}{}, but neither model.safetensors nor model.safetensors.index.json, which says "
      "where each tensor is",
      folder, fmt::join(names, ", "), more);
}

/// Throws unless two readings of one model, each with its file, have the same tensors.
void check_same(const Checkpoint& a, const std::string& file_a, const Checkpoint& b,
                const std::string& file_b) {
  const auto refuse = [&](const std::string& name) {
    throw_usage(
        "'{}' and '{}' are both there, and the tensor for '{}' differs; remove the one that is "
        "not the model (transformers reads model.safetensors)",
        file_a, file_b, name);
  };
  for (const auto& [name, tensor] : a.tensors) {
    const auto other = b.tensors.find(name);
    if (other == b.tensors.end() || !is_same(tensor, other->second)) refuse(name);
  }
  for (const auto& [name, tensor] : b.tensors)
    if (!a.tensors.contains(name)) refuse(name);
}

}  // namespace

Checkpoint open_safetensors(const std::string& folder,
                            const std::vector<std::string>& ignored_keys) {
  Checkpoint checkpoint;
  const std::string config = folder + "/config.json", single = folder + "/model.safetensors",
                    index = single + ".index.json", tokenizer = folder + "/tokenizer.json";
  const CheckpointConfig parsed =
      parse_checkpoint_config(config, read_text_file(config, "a config.json"), ignored_keys);
  checkpoint.config = parsed.config;
  checkpoint.longest_text = parsed.longest_text;
  checkpoint.norms_less_one = parsed.norms_less_one;
  const bool has_single = has_entry(single), has_index = has_entry(index);
  if (!has_single && !has_index) refuse_shards(folder);
  const std::vector<std::string> shards =
      has_index ? shards_of(folder, index) : std::vector{single};
  if (has_single && shards != std::vector{single}) {
    Checkpoint sharded;
    sharded.config = checkpoint.config;
    sharded.norms_less_one = checkpoint.norms_less_one;
    for (const std::string& file : shards) read_tensors(sharded, file);
    read_tensors(checkpoint, single);
    check_same(checkpoint, single, sharded, index);
  } else {
    for (const std::string& file : shards) read_tensors(checkpoint, file);
  }
  if (has_entry(tokenizer)) checkpoint.tokenizer = tokenizer_name(tokenizer);
  return checkpoint;
}

}  // namespace gyre
