// Hugging Face's folders: config.json and safetensors files. A safetensors file is a 64-bit length,
// a JSON object of that length, and the bytes of all tensors:
// https://huggingface.co/docs/safetensors

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>

#include "core/error.hpp"
#include "core/json.hpp"
#include "io/checkpoint.hpp"
#include "io/model_config_file.hpp"
#include "io/resources.hpp"
#include "io/sha256.hpp"

namespace gyre {
namespace {

constexpr TensorNames hugging_face = {"model.embed_tokens.weight",
                                      "model.norm.weight",
                                      "lm_head.weight",
                                      "model.layers.",
                                      {{{"input_layernorm.weight", "attn_norm"},
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
                                        {"post_attention_layernorm.weight", "mlp_norm"},
                                        {"mlp.gate_proj.weight", "w_gate"},
                                        {"mlp.up_proj.weight", "w_up"},
                                        {"mlp.down_proj.weight", "w_down"}}}};

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

StoredTensor tensor_of(const MappedFile& file, std::span<const std::byte> data,
                       const std::string& name, const Json& entry) {
  const std::string what = fmt::format("'{}': the tensor '{}'", file.path(), name);
  const auto shape = sizes_of(entry, "shape"), offsets = sizes_of(entry, "data_offsets");
  if (!shape || !offsets || offsets->size() != 2 || !entry.contains("dtype") ||
      !entry["dtype"].is_string())
    throw_usage("{} lacks its dtype, shape or data_offsets", what);
  const WeightEncoding encoding = safetensors_encoding(entry["dtype"].get<std::string>(), what);
  const double bytes =
      std::accumulate(shape->begin(), shape->end(), static_cast<double>(block_of(encoding).bytes),
                      std::multiplies<>());  // a product of integers may overflow
  if ((*offsets)[1] < (*offsets)[0] || (*offsets)[1] > std::ssize(data))
    throw_usage("{} has the bytes {} to {}; the file has {}", what, (*offsets)[0], (*offsets)[1],
                data.size());
  if (bytes != (*offsets)[1] - (*offsets)[0])
    throw_usage("{} is {} and has {} bytes; {} are needed", what, h5::to_string(*shape),
                (*offsets)[1] - (*offsets)[0], bytes);
  return {*shape, encoding, data.data() + (*offsets)[0], file.path()};
}

void read_tensors(Checkpoint& checkpoint, const std::string& path) {
  checkpoint.files.push_back(std::make_unique<MappedFile>(path));
  const MappedFile& file = *checkpoint.files.back();
  uint64_t length = 0;
  if (file.bytes().size() >= sizeof(length))
    std::memcpy(&length, file.bytes().data(), sizeof(length));
  if (length == 0 || length > file.bytes().size() - sizeof(length))
    throw_usage("'{}' is no safetensors file, or truncated: a header of {} bytes, a file of {}",
                path, length, file.bytes().size());
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()) + sizeof(length),
                              length);
  const Json header = parse_json(path, text, "the header of a safetensors file");
  if (!header.is_object()) throw_usage("'{}': the header is no JSON object", path);
  const std::span<const std::byte> data = file.bytes().subspan(sizeof(length) + length);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    StoredTensor tensor = tensor_of(file, data, name, entry);
    if (!name.ends_with(".rotary_emb.inv_freq"))  // it follows from the configuration
      add_tensor(checkpoint, hugging_face, name, std::move(tensor));
  }
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

}  // namespace

Checkpoint open_safetensors(const std::string& folder,
                            const std::vector<std::string>& ignored_keys) {
  Checkpoint checkpoint;
  const std::string config = folder + "/config.json", single = folder + "/model.safetensors",
                    index = single + ".index.json", tokenizer = folder + "/tokenizer.json";
  checkpoint.config =
      parse_checkpoint_config(config, read_text_file(config, "a config.json"), ignored_keys);
  const bool is_sharded = std::filesystem::exists(index);
  for (const std::string& file : is_sharded ? shards_of(folder, index) : std::vector{single})
    read_tensors(checkpoint, file);
  if (std::filesystem::exists(tokenizer))
    checkpoint.tokenizer = "sha256:" + sha256_of_file(tokenizer);
  return checkpoint;
}

}  // namespace gyre
