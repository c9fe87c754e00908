#include "io/checkpoint.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/error.hpp"
#include "io/model_file.hpp"
#include "io/resources.hpp"

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
  std::map<const std::byte*, const StoredTensor*> by_place;
  for (const auto& [name, tensor] : checkpoint.tensors) {
    const auto [at, is_new] = by_place.emplace(tensor.data, &tensor);
    if (!is_new) throw_usage("'{}': two tensors share bytes of the file", tensor.file);
  }
  const std::byte* end = nullptr;
  for (const auto& [data, tensor] : by_place) {
    if (data < end) throw_usage("'{}': two tensors share bytes of the file", tensor->file);
    const EncodedBlock block = block_of(tensor->encoding);
    end = data + h5::elements_of(tensor->shape) / block.values * block.bytes;
  }
}

bool is_same(const StoredTensor& a, const StoredTensor& b) {
  const EncodedBlock block = block_of(a.encoding);
  const int64_t bytes = h5::elements_of(a.shape) / block.values * block.bytes;
  const bool same =
      a.encoding == b.encoding && a.shape == b.shape && std::memcmp(a.data, b.data, bytes) == 0;
  for (const StoredTensor* tensor : {&a, &b}) release_pages(tensor->data, bytes);
  return same;
}

void check_tensors(const Checkpoint& checkpoint, const std::string& path) {
  ConfigErrors errors;
  for (const auto& [name, shape] : model_tensors(checkpoint.config)) {
    const auto found = checkpoint.tensors.find(name);
    if (found == checkpoint.tensors.end()) {
      errors.add("the tensor for '{}' is missing", name);
      continue;
    }
    const h5::Shape wanted = stored_shape(name, shape, checkpoint.config.vocab_size);
    if (found->second.shape != wanted)
      errors.add("the tensor for '{}' in '{}' is {}; the configuration wants {}", name,
                 found->second.file, h5::to_string(found->second.shape), h5::to_string(wanted));
  }
  const auto known = model_tensors(checkpoint.config);
  const bool tied = checkpoint.config.tied_head;
  for (const auto& [name, tensor] : checkpoint.tensors)
    if (!(tied && name == "head") &&
        std::none_of(known.begin(), known.end(), [&](const auto& k) { return k.first == name; }))
      errors.add("'{}' has a tensor for '{}'; the configuration has {} layers", tensor.file, name,
                 checkpoint.config.num_hidden_layers);
  errors.throw_if_any(path);
  check_overlaps(checkpoint);
  if (tied && checkpoint.tensors.contains("head") &&
      !is_same(checkpoint.tensors.at("head"), checkpoint.tensors.at("embed")))
    throw_usage("{}: the head is the embedding (tie_word_embeddings), but another one is stored",
                path);
}

/// Whether layers have a tensor of this name.
bool layers_have(const ModelConfig& config, const std::string& leaf) {
  if (leaf == "bq" || leaf == "bk" || leaf == "bv") return config.qkv_bias;
  if (leaf == "q_norm" || leaf == "k_norm") return config.qk_norm;
  return leaf != "bo" || config.output_bias;
}

std::string our_name(const ModelConfig& config, const TensorNames& names, const std::string& name,
                     const std::string& file) {
  if (name == names.embed) return "embed";
  if (name == names.final_norm) return "final_norm";
  if (name == names.head) return "head";
  const std::string_view layer = names.layer;
  const size_t dot = name.find('.', layer.size());
  if (name.starts_with(layer) && dot != std::string::npos)
    for (const auto& [theirs, ours] : names.of_layer)
      if (name.substr(dot + 1) == theirs && layers_have(config, ours))
        return fmt::format("layers/{}/{}", name.substr(layer.size(), dot - layer.size()), ours);
  throw_usage("'{}': the tensor '{}' is none of this decoder's; it would not be read", file, name);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  require_regular_file(path);
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw_unreadable(path, errno);
  const off_t size = lseek(file, 0, SEEK_END);
  void* at = size == 0  ? nullptr
             : size < 0 ? MAP_FAILED
                        : mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  const int error = errno;
  close(file);
  if (at == MAP_FAILED) throw_unreadable(path, error);
  bytes_ = {static_cast<const std::byte*>(at), static_cast<size_t>(size)};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

void release_pages(const std::byte* data, int64_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto in_page = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % page);
  madvise(const_cast<std::byte*>(data) - in_page, bytes + in_page, MADV_DONTNEED);
}

void add_tensor(Checkpoint& checkpoint, const TensorNames& names, const std::string& name,
                StoredTensor tensor) {
  const std::string file = tensor.file;
  const auto [at, is_new] =
      checkpoint.tensors.emplace(our_name(checkpoint.config, names, name, file), std::move(tensor));
  if (!is_new) throw_usage("'{}': the tensor '{}' is there twice", file, name);
}

Checkpoint open_checkpoint(const std::string& path, const std::vector<std::string>& ignored_keys) {
  const bool is_folder = std::filesystem::is_directory(path);
  if (!is_folder && !path.ends_with(".gguf"))
    throw_usage(
        "'{}' is no model; wanted: a folder with config.json and model.safetensors, or a file "
        "NAME.gguf",
        path);
  Checkpoint checkpoint =
      is_folder ? open_safetensors(path, ignored_keys) : open_gguf(path, ignored_keys);
  check_tensors(checkpoint, path);
  return checkpoint;
}

}  // namespace gyre
