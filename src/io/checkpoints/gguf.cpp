// GGUF, the files of llama.cpp: a header of typed keys, a table of tensors, and their bytes:
// https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <variant>

#include "core/error.hpp"
#include "core/index.hpp"
#include "io/checkpoints/checkpoint.hpp"
#include "io/checkpoints/decoder_keys.hpp"
#include "io/checkpoints/rope_keys.hpp"
#include "io/schemas/model_file.hpp"
#include "io/trust/sha256.hpp"

namespace gyre {
namespace {

/// A list is kept as its length and, if its elements are texts, their digest.
struct GgufList {
  int64_t length = 0;
  std::string sha256;
};
using GgufValue = std::variant<int64_t, double, std::string, GgufList>;

class GgufParser {
 public:
  explicit GgufParser(const InputFile& file) : file_(file) {}
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  std::string text() {
    const auto length = number<uint64_t>();
    const auto* at = reinterpret_cast<const char*>(take(length));
    return {at, static_cast<size_t>(length)};
  }
  GgufValue value() { return value_of_type(number<uint32_t>()); }
  int64_t position() const { return at_; }

 private:
  static constexpr uint32_t text_type = 8;
  /// The next `count` bytes, until the next call.
  const std::byte* take(uint64_t count) {
    if (count > static_cast<uint64_t>(file_.size() - at_))
      throw_usage("'{}' is truncated: {} bytes are needed at byte {} of {}", file_.path(), count,
                  at_, file_.size());
    const auto bytes = static_cast<int64_t>(count);
    if (at_ + bytes > begin_ + std::ssize(block_)) {
      begin_ = at_;
      block_.resize(std::min(file_.size() - at_, std::max(bytes, int64_t{1} << 20)));
      file_.read(begin_, block_);
    }
    const std::byte* from = block_.data() + (at_ - begin_);
    at_ += bytes;
    return from;
  }
  GgufValue value_of_type(uint32_t type) {
    switch (type) {
      case 0:
        return int64_t{number<uint8_t>()};
      case 1:
        return int64_t{number<int8_t>()};
      case 2:
        return int64_t{number<uint16_t>()};
      case 3:
        return int64_t{number<int16_t>()};
      case 4:
        return int64_t{number<uint32_t>()};
      case 5:
        return int64_t{number<int32_t>()};
      case 6:
        return double{number<float>()};
      case 7:
        return int64_t{number<uint8_t>()};
      case text_type:
        return text();
      case 9:
        return list();
      case 10:
        return static_cast<int64_t>(number<uint64_t>());
      case 11:
        return number<int64_t>();
      case 12:
        return number<double>();
      default:
        throw_usage("'{}': a value at byte {} has the unknown type {}", file_.path(), at_, type);
    }
  }
  GgufList list() {
    const auto type = number<uint32_t>();
    const auto length = number<uint64_t>();
    if (type == 9) throw_usage("'{}': lists of lists are not supported", file_.path());
    Sha256 digest;
    for (uint64_t i = 0; i < length; ++i) {
      const GgufValue item = value_of_type(type);
      const auto* text = std::get_if<std::string>(&item);
      if (text == nullptr) continue;
      const uint64_t bytes = text->size();
      digest.add(&bytes, sizeof(bytes));
      digest.add(text->data(), text->size());
    }
    return {static_cast<int64_t>(length), type == text_type ? digest.hex() : ""};
  }

  const InputFile& file_;
  std::vector<std::byte> block_;  ///< bytes of the file from begin_ on
  int64_t begin_ = 0, at_ = 0;
};

using GgufKeys = std::map<std::string, GgufValue>;

class GgufConfig {
 public:
  GgufConfig(const std::string& path, const GgufKeys& keys) : path_(path), keys_(keys) {}
  const std::string& path() const { return path_; }
  int64_t whole(const std::string& key, std::optional<int64_t> otherwise = {}) {
    const GgufValue* found = find(key, otherwise.has_value());
    if (found == nullptr) return *otherwise;
    if (const auto* value = std::get_if<int64_t>(found)) return *value;
    throw_usage("'{}': '{}' is no whole number", path_, key);
  }
  double real(const std::string& key, std::optional<double> otherwise = {}) {
    const GgufValue* found = find(key, otherwise.has_value());
    if (found == nullptr) return *otherwise;
    if (const auto* value = std::get_if<double>(found)) return *value;
    throw_usage("'{}': '{}' is no real number", path_, key);
  }
  std::string text(const std::string& key, std::optional<std::string> otherwise = {}) {
    const GgufValue* found = find(key, otherwise.has_value());
    if (found == nullptr) return *otherwise;
    if (const auto* value = std::get_if<std::string>(found)) return *value;
    throw_usage("'{}': '{}' is no text", path_, key);
  }
  GgufList list(const std::string& key) {
    const GgufValue* found = find(key, true);
    const auto* value = found == nullptr ? nullptr : std::get_if<GgufList>(found);
    return value == nullptr ? GgufList{} : *value;
  }
  /// Throws a usage error that lists the keys with this prefix that are neither read nor `ignored`,
  /// and those of `ignored` that are read or not there.
  void refuse_others(const std::string& prefix, const std::vector<std::string>& ignored) const {
    ConfigErrors errors;
    std::vector<std::string> names;
    for (const auto& [key, value] : keys_) names.push_back(key);
    check_ignored_keys(errors, ignored, names, read_);
    for (const auto& [key, value] : keys_) {
      const bool is_ours = key.starts_with(prefix) && !read_.contains(key);
      if (is_ours && std::find(ignored.begin(), ignored.end(), key) == ignored.end())
        errors.add("the key '{}' is not known; --ignore-key {} if it changes no result", key, key);
    }
    errors.throw_if_any(path_);
  }

 private:
  const GgufValue* find(const std::string& key, bool optional) {
    read_.insert(key);
    const auto found = keys_.find(key);
    if (found == keys_.end() && !optional) throw_usage("'{}' lacks '{}'", path_, key);
    return found == keys_.end() ? nullptr : &found->second;
  }
  const std::string& path_;
  const GgufKeys& keys_;
  std::set<std::string> read_;
};

/// Reads the scaling of the rotary embedding from 'rope.scaling.*'. Llama 3.1 has a tensor instead
/// (read_rope_freqs).
RopeScaling gguf_rope_scaling(GgufConfig& file, const std::string& architecture) {
  const std::string prefix = architecture + ".rope.scaling.";
  RopeScaling s;
  s.factor = file.real(prefix + "factor", 1);
  const std::string type = file.text(prefix + "type", s.factor == 1 ? "none" : "linear");
  if (type == "linear") {
    s.type = RopeType::linear;
  } else if (type == "yarn") {
    s.type = RopeType::yarn;
    s.original_max_position_embeddings = file.whole(prefix + "original_context_length");
    s.attention_factor = yarn_attention_factor(s.factor);
  } else if (type != "none") {
    throw_usage("'{}': '{}type' is '{}'; types that can be computed are none, linear and yarn",
                file.path(), prefix, type);
  } else {
    s.factor = 1;
  }
  return s;
}

/// Sets the divisors of all rotary frequencies from the tensor 'rope_freqs.weight', float32.
void read_rope_freqs(ModelConfig& config, const StoredTensor& tensor) {
  RopeScaling& s = config.rope_scaling;
  const std::string what = fmt::format("'{}': the tensor 'rope_freqs.weight'", tensor.file->path());
  const h5::Shape wanted = {config.rotary_width() / 2};
  if (tensor.shape != wanted || tensor.encoding != WeightEncoding::f32)
    throw_usage("{} is {}; wanted: float32 {}", what, h5::to_string(tensor.shape),
                h5::to_string(wanted));
  if (s.type != RopeType::plain)
    throw_usage("{} and 'rope.scaling.type' are both there; one of them can be computed", what);
  std::vector<float> divisors(static_cast<size_t>(wanted[0]));
  tensor.file->read(tensor.offset, std::as_writable_bytes(std::span(divisors)));
  s.type = RopeType::divided;
  s.divisors.assign(divisors.begin(), divisors.end());
  ConfigErrors errors;
  check_config(errors, config);
  errors.throw_if_any(tensor.file->path());
}

void require(bool holds, const std::string& path, const std::string& key, const char* wanted) {
  if (!holds) throw_usage("'{}': '{}' asks for another decoder; wanted: {}", path, key, wanted);
}

/// The properties in which architectures of llama.cpp differ.
struct GgufArchitecture {
  const char* name;
  bool qk_norm;
  bool interleaved_rotary;  ///< a pair is elements (2i, 2i + 1), not (i, i + rotary_width() / 2)
};
constexpr GgufArchitecture architectures[] = {
    {"llama", false, true}, {"qwen2", false, false}, {"qwen3", true, false}};

const GgufArchitecture& architecture_of(GgufConfig& file) {
  const std::string name = file.text("general.architecture");
  for (const GgufArchitecture& architecture : architectures)
    if (name == architecture.name) return architecture;
  throw_usage("'{}': 'general.architecture' is '{}'; wanted: llama, qwen2 or qwen3", file.path(),
              name);
}

/// `biases`: names of the tensors that end in ".bias".
void set_features(ModelConfig& c, const GgufArchitecture& architecture, GgufConfig& file,
                  const std::set<std::string>& biases) {
  c.qk_norm = architecture.qk_norm;
  c.qkv_bias = biases.contains("blk.0.attn_q.bias");
  c.output_bias = biases.contains("blk.0.attn_output.bias");
  const std::string prefix = std::string(architecture.name) + ".";
  const std::string turning_key = prefix + "rope.dimension_count";
  const int64_t turning = file.whole(turning_key, c.head_dim);
  require(turning >= 2 && turning % 2 == 0 && turning <= c.head_dim, file.path(), turning_key,
          "an even number up to the head's width");
  if (turning != c.head_dim) c.rotary_dim = turning;
  c.rope_theta = file.real(prefix + "rope.freq_base", 1e4);
  c.rope_scaling = gguf_rope_scaling(file, architecture.name);
}

ModelConfig gguf_config(GgufConfig& file, const GgufArchitecture& architecture,
                        const std::set<std::string>& biases,
                        const std::vector<std::string>& ignored, int64_t& longest_text) {
  const std::string prefix = std::string(architecture.name) + ".";
  ModelConfig c;
  c.hidden_size = file.whole(prefix + "embedding_length");
  c.num_hidden_layers = file.whole(prefix + "block_count");
  c.num_attention_heads = file.whole(prefix + "attention.head_count");
  c.num_key_value_heads = file.whole(prefix + "attention.head_count_kv", c.num_attention_heads);
  c.intermediate_size = file.whole(prefix + "feed_forward_length");
  c.head_dim = file.whole(prefix + "attention.key_length",
                          c.hidden_size / std::max<int64_t>(1, c.num_attention_heads));
  c.vocab_size = file.whole(prefix + "vocab_size", file.list("tokenizer.ggml.tokens").length);
  c.vocab_padded = round_up(std::clamp<int64_t>(c.vocab_size, 1, INT32_MAX), 128);
  c.rms_norm_eps = file.real(prefix + "attention.layer_norm_rms_epsilon");
  set_features(c, architecture, file, biases);
  const std::string value_key = prefix + "attention.value_length";
  require(file.whole(value_key, c.head_dim) == c.head_dim, file.path(), value_key,
          "values as wide as keys");
  const std::string experts_key = prefix + "expert_count";
  require(file.whole(experts_key, 0) == 0, file.path(), experts_key, "0");
  longest_text = std::max<int64_t>(0, file.whole(prefix + "context_length", 0));
  file.refuse_others(prefix, ignored);
  ConfigErrors errors;
  if (c.output_bias && !c.qkv_bias)
    errors.add("there is 'blk.0.attn_output.bias', but no 'blk.0.attn_q.bias'");
  check_config(errors, c);
  errors.throw_if_any(file.path());
  return c;
}

WeightEncoding gguf_encoding(uint32_t type, const std::string& what) {
  switch (type) {
    case 0:
      return WeightEncoding::f32;
    case 1:
      return WeightEncoding::f16;
    case 2:
      return WeightEncoding::q4_0;
    case 3:
      return WeightEncoding::q4_1;
    case 8:
      return WeightEncoding::q8_0;
    case 14:
      return WeightEncoding::q6_k;
    case 30:
      return WeightEncoding::bf16;
    default:
      throw_usage(
          "{} has ggml type {}; types that can be read are F32 (0), F16 (1), Q4_0 (2), Q4_1 "
          "(3), Q8_0 (8), Q6_K (14) and BF16 (30)",
          what, type);
  }
}

constexpr std::pair<const char*, const char*> llama_cpp_in_layer[] = {
    {"attn_norm.weight", "attn_norm"},
    {"attn_q.weight", "wq"},
    {"attn_k.weight", "wk"},
    {"attn_v.weight", "wv"},
    {"attn_q.bias", "bq"},
    {"attn_k.bias", "bk"},
    {"attn_v.bias", "bv"},
    {"attn_q_norm.weight", "q_norm"},
    {"attn_k_norm.weight", "k_norm"},
    {"attn_output.weight", "wo"},
    {"attn_output.bias", "bo"},
    {"ffn_norm.weight", "mlp_norm"},
    {"ffn_gate.weight", "w_gate"},
    {"ffn_up.weight", "w_up"},
    {"ffn_down.weight", "w_down"}};
constexpr TensorNames llama_cpp = {"token_embd.weight", "output_norm.weight", "output.weight",
                                   "blk.", llama_cpp_in_layer};

struct GgufEntry {
  std::string name;
  StoredTensor tensor;
  uint64_t offset = 0;
};

GgufEntry read_entry(GgufParser& parser, const InputFile& file) {
  GgufEntry entry;
  entry.name = parser.text();
  const std::string what = fmt::format("'{}': the tensor '{}'", file.path(), entry.name);
  const auto dimensions = parser.number<uint32_t>();
  if (dimensions < 1 || dimensions > 4) throw_usage("{} has {} dimensions", what, dimensions);
  double values = 1;
  for (uint32_t i = 0; i < dimensions; ++i) {
    const auto extent = parser.number<uint64_t>();
    values *= static_cast<double>(extent);
    if (extent < 1 || values > 0x1p48) throw_usage("{} has an extent of {}", what, extent);
    entry.tensor.shape.insert(entry.tensor.shape.begin(), static_cast<int64_t>(extent));
  }
  entry.tensor.encoding = gguf_encoding(parser.number<uint32_t>(), what);
  entry.tensor.file = &file;
  entry.offset = parser.number<uint64_t>();
  const EncodedBlock block = block_of(entry.tensor.encoding);
  if (entry.tensor.shape.back() % block.values != 0)
    throw_usage("{} is {}; its rows must be whole blocks of {}", what,
                h5::to_string(entry.tensor.shape), block.values);
  return entry;
}

}  // namespace

Checkpoint open_gguf(const std::string& path, const std::vector<std::string>& ignored_keys) {
  Checkpoint checkpoint;
  checkpoint.files.push_back(std::make_unique<InputFile>(path));
  const InputFile& file = *checkpoint.files.back();
  GgufParser parser(file);
  constexpr uint32_t magic = 0x46554747;  // "GGUF"
  if (file.size() < 24 || parser.number<uint32_t>() != magic)
    throw_usage("'{}' is no GGUF file", path);
  const auto version = parser.number<uint32_t>();
  if (version != 2 && version != 3)
    throw_usage("'{}' is GGUF version {}; versions 2 and 3 can be read", path, version);
  const auto tensors = parser.number<uint64_t>(), count = parser.number<uint64_t>();
  GgufKeys keys;
  for (uint64_t i = 0; i < count; ++i) {
    std::string key = parser.text();
    GgufValue value = parser.value();
    if (const auto [at, is_new] = keys.emplace(std::move(key), std::move(value)); !is_new)
      throw_usage("'{}': the key '{}' is there twice", path, at->first);
  }
  GgufConfig config(path, keys);
  const std::string tokens = config.list("tokenizer.ggml.tokens").sha256;
  if (!tokens.empty()) checkpoint.tokenizer = "sha256:" + tokens;
  std::vector<GgufEntry> entries;
  std::set<std::string> biases;
  for (uint64_t i = 0; i < tensors; ++i) {
    entries.push_back(read_entry(parser, file));
    if (entries.back().name.ends_with(".bias")) biases.insert(entries.back().name);
  }
  const GgufArchitecture& architecture = architecture_of(config);
  checkpoint.config =
      gguf_config(config, architecture, biases, ignored_keys, checkpoint.longest_text);
  checkpoint.interleaved_rotary = architecture.interleaved_rotary;
  const int64_t alignment = config.whole("general.alignment", 32);
  if (alignment < 1 || alignment > 1 << 20)
    throw_usage("'{}': 'general.alignment' is {}; it must be from 1 to 2^20", path, alignment);
  const int64_t begin = round_up(parser.position(), alignment);
  for (GgufEntry& entry : entries) {
    if (entry.offset > static_cast<uint64_t>(file.size()))
      throw_usage("'{}' is truncated: the tensor '{}' begins at byte {} + {} of {}", path,
                  entry.name, begin, entry.offset, file.size());
    entry.tensor.offset = begin + static_cast<int64_t>(entry.offset);
    if (entry.tensor.offset + entry.tensor.bytes() > file.size())
      throw_usage("'{}' is truncated: the tensor '{}' ends at byte {} of {}", path, entry.name,
                  entry.tensor.offset + entry.tensor.bytes(), file.size());
    if (entry.name == "rope_freqs.weight")
      read_rope_freqs(checkpoint.config, entry.tensor);
    else
      add_tensor(checkpoint, llama_cpp, entry.name, entry.tensor);
  }
  checkpoint.config.tied_head = !checkpoint.tensors.contains("head");
  return checkpoint;
}

}  // namespace gyre
