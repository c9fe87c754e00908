#pragma once
// Checkpoints of other programs: the tensors and the configuration of a Llama-style decoder, in
// safetensors (Hugging Face) or GGUF (llama.cpp).

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/model_config.hpp"
#include "io/checkpoints/weight_encoding.hpp"
#include "io/h5.hpp"

namespace gyre {

/// A regular file, open for reading. It is not mapped: if it shrinks meanwhile, or its file system
/// fails, a read is an error instead of a SIGBUS.
class InputFile {
 public:
  explicit InputFile(const std::string& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  const std::string& path() const { return path_; }
  /// Bytes of the file when it was opened.
  int64_t size() const { return size_; }
  /// Fills `out` with the bytes from `offset` on. Throws a runtime error that names the file if it
  /// cannot. Threads may read at the same time.
  void read(int64_t offset, std::span<std::byte> out) const;

 private:
  std::string path_;
  int file_ = -1;
  int64_t size_ = 0;
};

/// A tensor as it is stored: row-major, [out, in] for a matrix.
struct StoredTensor {
  h5::Shape shape;
  WeightEncoding encoding = WeightEncoding::f32;
  const InputFile* file = nullptr;
  int64_t offset = 0;  ///< of its first byte in the file
  /// If `run` > 0, the tensor is a part of a matrix at `offset`: the rows first to first + run - 1,
  /// and the same rows of each further group of `stride` rows.
  int64_t first = 0, run = 0, stride = 0;
  bool less_one = false;  ///< 1 must be added to each element

  int64_t bytes() const;
  /// Row of the matrix at `offset`.
  int64_t place_of(int64_t row) const {
    return run == 0 ? row : first + row / run * stride + row % run;
  }
};

struct Checkpoint {
  ModelConfig config;
  std::string tokenizer;     ///< "sha256:..." of its tokenizer; "" if it has none
  int64_t longest_text = 0;  ///< tokens of the longest text that it was made for; 0: unknown
  /// wq, wk, bq and bk are in llama.cpp's order: elements i and i + rotary_width() / 2 of a head,
  /// which rotate together, are stored at 2i and 2i + 1.
  bool interleaved_rotary = false;
  bool norms_less_one = false;  ///< 1 must be added to the weights of all norms but o_norm
  std::map<std::string, StoredTensor> tensors;  ///< by the names of model_tensors()
  std::vector<std::unique_ptr<InputFile>> files;
};

/// Opens a folder with config.json and model.safetensors (or model.safetensors.index.json and its
/// shards), or a file NAME.gguf. Throws a usage error that names the file and the tensor or key if
/// one is missing, damaged or of a wrong type or shape, or unknown: a tensor that this decoder does
/// not read, or a key that might change results and is not one of `ignored_keys`. Serial.
Checkpoint open_checkpoint(const std::string& path, const std::vector<std::string>& ignored_keys);

// The readers of the two formats use the declarations below.

/// A stored matrix of `groups` groups of rows; a group has the rows of every part in turn.
struct FusedTensor {
  struct Part {
    const char* ours;
    int64_t rows;  ///< of a group
  };
  const char* theirs;
  int64_t groups;
  std::vector<Part> parts;
};

/// The names that a format gives to the tensors of model_tensors().
struct TensorNames {
  const char *embed, *final_norm, *head;
  const char* layer;                                              ///< what precedes "NUMBER.NAME"
  std::span<const std::pair<const char*, const char*>> of_layer;  ///< NAME, and our name
  /// The stored tensors that hold several of ours; null: the format has none.
  std::vector<FusedTensor> (*fused)(const ModelConfig&) = nullptr;
};
/// Adds a tensor by its name in the file, or the tensors that it holds. Throws a usage error if the
/// name was added before, or if this decoder has no such tensor.
void add_tensor(Checkpoint& checkpoint, const TensorNames& names, const std::string& name,
                const StoredTensor& tensor);
/// Whether two tensors have the same type, shape and bytes.
bool is_same(const StoredTensor& a, const StoredTensor& b);
Checkpoint open_safetensors(const std::string& folder,
                            const std::vector<std::string>& ignored_keys);
Checkpoint open_gguf(const std::string& path, const std::vector<std::string>& ignored_keys);

}  // namespace gyre
