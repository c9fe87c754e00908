#pragma once
// Weights of a decoder and their file, "gyre/model".

#include <string>
#include <utility>
#include <vector>

#include "core/model_config.hpp"
#include "io/schemas/schema.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

/// Adds all errors of `config`.
void check_config(ConfigErrors& errors, const ModelConfig& config);

/// Name, relative to /model, and shape of every tensor, in the layout y = x W: [in, out].
std::vector<std::pair<std::string, h5::Shape>> model_tensors(const ModelConfig& config);

/// "layers/3/wq"
std::string layer_tensor(int64_t layer, const std::string& name);

/// An open model. Each rank reads the blocks that it needs. Calls are collective over the
/// constructor's communicator, which must outlive the object.
class ModelFile {
 public:
  /// Reads the configuration, and checks that every tensor has its type and shape and that the file
  /// asks for nothing that the decoder does not support (other tensors, experts). Throws a usage
  /// error that lists all errors.
  ModelFile(Communicator& comm, const std::string& path);

  const ModelConfig& config() const { return config_; }
  /// The widest type of the stored matrices: float32, float16 or bfloat16. Reading widens all
  /// values to float32, which is exact.
  h5::Type widest_matrix_type() const { return widest_; }
  /// Name of the tokenizer whose ids the model takes; "" if the file does not say.
  const std::string& tokenizer() const { return tokenizer_; }
  /// Tokens of the longest text that the model was made for; 0 if the file does not say.
  int64_t longest_text() const { return longest_text_; }

  /// Reads a block of tensor `name` as a packed [row_count, col_count]; a one-dimensional tensor is
  /// one row. A NaN or infinity is a usage error that names its place. Collective; blocks may
  /// differ between ranks and be empty.
  Buffer<float> read_matrix(const std::string& name, int64_t row_begin, int64_t row_count,
                            int64_t col_begin, int64_t col_count);
  /// Reads a whole one-dimensional tensor.
  Buffer<float> read_vector(const std::string& name);

 private:
  Communicator& comm_;
  h5::File file_;
  ModelConfig config_;
  std::string tokenizer_;
  int64_t longest_text_ = 0;
  h5::Type widest_ = h5::Type::bfloat16;
};

}  // namespace gyre
