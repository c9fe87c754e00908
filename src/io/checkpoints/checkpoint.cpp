#include "io/checkpoints/checkpoint.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/error.hpp"
#include "io/resources.hpp"
#include "io/schemas/model_file.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

/// A tensor's shape in a checkpoint: [out, in], with the vocabulary not padded; embed as [in, out].
h5::Shape stored_shape(const std::string& name, h5::Shape shape, int64_t vocab_size) {
  if (name == "embed") return {vocab_size, shape[1]};
  if (name == "head") return {vocab_size, shape[0]};
  if (shape.size() == 2) std::swap(shape[0], shape[1]);
  return shape;
}

/// Throws if two tensors share bytes of a file.
void check_overlaps(const Checkpoint& checkpoint) {
  std::vector<const StoredTensor*> by_place;
  for (const auto& [name, tensor] : checkpoint.tensors) by_place.push_back(&tensor);
  std::ranges::sort(by_place, {},
                    [](const StoredTensor* t) { return std::pair(t->file, t->offset); });
  for (size_t i = 1; i < by_place.size(); ++i)
    if (by_place[i]->file == by_place[i - 1]->file &&
        by_place[i]->offset < by_place[i - 1]->offset + by_place[i - 1]->bytes())
      throw_usage("'{}': two tensors share bytes of the file", by_place[i]->file->path());
}

void check_tensors(const Checkpoint& checkpoint, const std::string& path) {
  ConfigErrors errors;
  constexpr int64_t most_named = 10;
  int64_t missing = 0;
  for (const auto& [name, shape] : model_tensors(checkpoint.config)) {
    const auto found = checkpoint.tensors.find(name);
    if (found == checkpoint.tensors.end()) {
      if (++missing <= most_named) errors.add("the tensor for '{}' is missing", name);
      continue;
    }
    const h5::Shape wanted = stored_shape(name, shape, checkpoint.config.vocab_size);
    if (found->second.shape != wanted)
      errors.add("the tensor for '{}' in '{}' is {}; the configuration wants {}", name,
                 found->second.file->path(), h5::to_string(found->second.shape),
                 h5::to_string(wanted));
  }
  if (missing > most_named) errors.add("{} more tensors are missing", missing - most_named);
  const auto known = model_tensors(checkpoint.config);
  const bool tied = checkpoint.config.tied_head;
  for (const auto& [name, tensor] : checkpoint.tensors)
    if (!(tied && name == "head") &&
        std::none_of(known.begin(), known.end(), [&](const auto& k) { return k.first == name; }))
      errors.add("'{}' has a tensor for '{}'; the configuration has {} layers", tensor.file->path(),
                 name, checkpoint.config.num_hidden_layers);
  errors.throw_if_any(path);
  if (tied && checkpoint.tensors.contains("head") &&
      !is_same(checkpoint.tensors.at("head"), checkpoint.tensors.at("embed")))
    throw_usage(
        "{}: the head is the embedding (tie_word_embeddings), but another one is stored; "
        "\"tie_word_embeddings\": false in config.json would use that one",
        path);
}

/// Whether layers have a tensor of this name.
bool layers_have(const ModelConfig& config, const std::string& leaf) {
  if (leaf == "bq" || leaf == "bk" || leaf == "bv") return config.qkv_bias;
  if (leaf == "q_norm" || leaf == "k_norm") return config.qk_norm;
  return leaf != "bo" || config.output_bias;
}

/// The parts of a fused tensor, with our names in a layer.
std::vector<std::pair<std::string, StoredTensor>> parts_of(const FusedTensor& fused,
                                                           const std::string& name,
                                                           StoredTensor whole) {
  if (whole.shape.size() == 3 && whole.shape[1] == 1) whole.shape.erase(whole.shape.begin() + 1);
  for (const FusedTensor::Part& part : fused.parts) whole.stride += part.rows;
  if (whole.shape.size() != 2 || whole.shape[0] != fused.groups * whole.stride)
    throw_usage("'{}': the tensor '{}' is {}; the configuration wants {} rows", whole.file->path(),
                name, h5::to_string(whole.shape), fused.groups * whole.stride);
  std::vector<std::pair<std::string, StoredTensor>> parts;
  for (const auto& [ours, rows] : fused.parts) {
    StoredTensor part = whole;
    part.shape[0] = fused.groups * rows;
    part.run = rows;
    parts.emplace_back(ours, part);
    whole.first += rows;
  }
  return parts;
}

/// The tensors that a tensor of a checkpoint holds, with our names; mostly one.
std::vector<std::pair<std::string, StoredTensor>> our_tensors(const ModelConfig& config,
                                                              const TensorNames& names,
                                                              const std::string& name,
                                                              const StoredTensor& tensor) {
  if (name == names.embed) return {{"embed", tensor}};
  if (name == names.final_norm) return {{"final_norm", tensor}};
  if (name == names.head) return {{"head", tensor}};
  const std::string_view layer = names.layer;
  const size_t dot = name.find('.', layer.size());
  if (name.starts_with(layer) && dot != std::string::npos) {
    const std::string place = "layers/" + name.substr(layer.size(), dot - layer.size()) + "/";
    const std::string leaf = name.substr(dot + 1);
    if (names.fused != nullptr)
      for (const FusedTensor& fused : names.fused(config)) {
        if (leaf != fused.theirs) continue;
        auto parts = parts_of(fused, name, tensor);
        for (auto& [ours, part] : parts) ours = place + ours;
        return parts;
      }
    for (const auto& [theirs, ours] : names.of_layer)
      if (leaf == theirs && layers_have(config, ours)) return {{place + ours, tensor}};
  }
  throw_usage("'{}': the tensor '{}' is none of this decoder's; it would not be read",
              tensor.file->path(), name);
}

}  // namespace

InputFile::InputFile(const std::string& path) : path_(path) {
  require_regular_file(path);
  file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) throw_unreadable(path, errno);
  size_ = lseek(file_, 0, SEEK_END);
  if (size_ >= 0) return;
  const int error = errno;
  close(file_);
  throw_unreadable(path, error);
}

InputFile::~InputFile() {
  close(file_);
}

void InputFile::read(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t count = pread(file_, out.data(), out.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_runtime("cannot read '{}': {}", path_, std::strerror(errno));
    if (count == 0)
      throw_runtime("cannot read '{}': it ends at byte {}, and had {} when it was opened", path_,
                    lseek(file_, 0, SEEK_END), size_);
    offset += count;
    out = out.subspan(count);
  }
}

int64_t StoredTensor::bytes() const {
  const EncodedBlock block = block_of(encoding);
  return h5::elements_of(shape) / block.values * block.bytes;
}

bool is_same(const StoredTensor& a, const StoredTensor& b) {
  if (a.encoding != b.encoding || a.shape != b.shape) return false;
  std::vector<std::byte> left, right;
  const bool by_row = a.run > 0 || b.run > 0;
  const int64_t row = by_row ? a.bytes() / std::max<int64_t>(1, a.shape[0]) : 0;
  const int64_t most = by_row ? row : int64_t{1} << 20;
  for (int64_t at = 0, r = 0; at < a.bytes(); at += std::ssize(left), ++r) {
    const WaitScope scope("reading " + a.file->path());
    left.resize(std::min(a.bytes() - at, most));
    right.resize(left.size());
    a.file->read(a.offset + (by_row ? a.place_of(r) * row : at), left);
    b.file->read(b.offset + (by_row ? b.place_of(r) * row : at), right);
    if (left != right) return false;
  }
  return true;
}

void add_tensor(Checkpoint& checkpoint, const TensorNames& names, const std::string& name,
                const StoredTensor& tensor) {
  for (auto& [ours, part] : our_tensors(checkpoint.config, names, name, tensor)) {
    part.less_one =
        checkpoint.norms_less_one && ours.ends_with("norm") && !ours.ends_with("o_norm");
    if (!checkpoint.tensors.emplace(ours, part).second)
      throw_usage("'{}': the tensor '{}' is there twice", tensor.file->path(), name);
  }
}

Checkpoint open_checkpoint(const std::string& path, const std::vector<std::string>& ignored_keys) {
  std::error_code unreadable;  // a link to itself is no folder
  const bool is_folder = std::filesystem::is_directory(path, unreadable);
  if (!is_folder && !path.ends_with(".gguf"))
    throw_usage(
        "'{}' is no model; wanted: a folder with config.json and model.safetensors, or NAME.gguf",
        path);
  Checkpoint checkpoint =
      is_folder ? open_safetensors(path, ignored_keys) : open_gguf(path, ignored_keys);
  check_tensors(checkpoint, path);
  if (!is_folder) check_overlaps(checkpoint);
  return checkpoint;
}

}  // namespace gyre
