#pragma once
// Weights of one tensor-parallel rank of a decoder. How they are split is told in decoder.hpp.

#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/matrix_ref.hpp"
#include "core/model_config.hpp"
#include "model/decoder_steps.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

/// Reads the block [row, row + rows) × [column, column + columns) of the matrix `name`; a vector is
/// one row. Collective.
using WeightReader = std::function<Buffer<float>(const std::string& name, int64_t row, int64_t rows,
                                                 int64_t column, int64_t columns)>;

/// A matrix [rows, cols], row-major, or a vector, which is one row; f32 or bf16.
class WeightTensor {
 public:
  WeightTensor() = default;
  WeightTensor(DType type, int64_t rows, int64_t cols, MemorySpace space = MemorySpace::host)
      : bytes_(rows * cols * size_of(type), space), type_(type), rows_(rows), cols_(cols) {}

  MatrixRef matrix() { return {bytes_.data(), type_, rows_, cols_, cols_}; }
  ConstMatrixRef matrix() const { return {bytes_.data(), type_, rows_, cols_, cols_}; }
  /// All values of an f32 tensor.
  std::span<const float> values() const {
    return {matrix().as<float>().data, static_cast<size_t>(rows_ * cols_)};
  }
  /// Copies the tensor to the stream's memory space unless it is there. Complete at return.
  void move_to(Stream& stream);
  /// Rounds an f32 tensor in host memory to bf16, or widens a bf16 tensor.
  WeightTensor converted(DType type) const;

 private:
  Buffer<std::byte> bytes_;
  DType type_ = DType::f32;
  int64_t rows_ = 0, cols_ = 0;
};

/// Matrices are [in, out], except embed and head, [vocabulary, hidden]. Vectors (norms, biases,
/// sinks) and convolutions are always f32.
class DecoderWeights {
 public:
  /// `layer` counts from 1; it is ignored for weights outside the layers. Precondition: the model
  /// has the weight.
  const WeightTensor& of(Weight weight, int64_t layer = 0) const {
    return tensors_.at(key(weight, layer));
  }
  void set(Weight weight, int64_t layer, WeightTensor tensor) {
    tensors_[key(weight, layer)] = std::move(tensor);
  }
  void move_to(Stream& stream);
  /// The weights of the norms alone, each times 1 + u, in the stream's memory space. u is random
  /// (by `seed`), with the standard deviation `deviation`, and the same on all ranks.
  DecoderWeights perturbed_norms(Stream& stream, uint64_t seed, double deviation) const;
  bool has(Weight weight, int64_t layer) const { return tensors_.contains(key(weight, layer)); }
  /// The same weights with all matrices in f32, for the reference decoder. In host memory.
  DecoderWeights widened() &&;

 private:
  using Key = std::pair<int64_t, Weight>;
  static Key key(Weight weight, int64_t layer) { return {is_of_layer(weight) ? layer : 0, weight}; }
  std::map<Key, WeightTensor> tensors_;
};

/// Adds one error to `errors` for each reason why `config`, the model `whose`, cannot be split over
/// `tp` ranks.
void check_tensor_parallel(const ModelConfig& config, int tp, ConfigErrors& errors,
                           const char* whose = "model");
/// The tensor-parallel sizes up to `ranks` that the model's head counts, intermediate size and
/// vocabulary admit.
std::vector<int> allowed_tensor_parallel(const ModelConfig& config, int ranks);

/// Reads the part of rank `tp_rank` of `tp`, tensor by tensor. Matrices are rounded to `type`.
/// Collective.
DecoderWeights load_weights(const ModelConfig& config, int tp, int tp_rank,
                            const WeightReader& read, DType type = DType::f32);

/// Bytes of these weights.
int64_t weight_bytes(const ModelConfig& config, int tp, DType type = DType::f32);

}  // namespace gyre
