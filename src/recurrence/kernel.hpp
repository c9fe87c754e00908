#pragma once
// Kernels of a recurrence: all heads of a run of tokens of one document, on CPUs or on a GPU.
//
// A run changes a state by an affine map: S_out = M S_in + B. Backward it is the transpose of M, and
// C, which does not depend on states: dS_in = Mᵀ dS_out + C. States and their gradients are f32,
// [value_heads, key_dim, value_dim]; maps are f32, [value_heads, map_elements()].

#include <functional>
#include <memory>
#include <span>

#include "recurrence/convolution.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Arrays of a rank, by RecurrenceArray; empty where the shape has none.
struct RecurrenceData {
  MatrixRef arrays[recurrence_arrays];
  MatrixRef& operator[](RecurrenceArray array) { return arrays[static_cast<int>(array)]; }
  const MatrixRef& operator[](RecurrenceArray array) const {
    return arrays[static_cast<int>(array)];
  }
};

/// Rows [begin, begin + tokens) of a rank's arrays.
struct TokenRun {
  int64_t begin = 0, tokens = 0;
};

/// States of the ends of a run; empty spans: a state before is 0, a gradient behind is 0, and
/// results are not wanted.
struct RunStates {
  std::span<const float> before = {};    ///< state before the run
  std::span<float> behind = {};          ///< to: state behind it (forward)
  std::span<const float> d_behind = {};  ///< gradient of that state (backward)
  std::span<float> d_before = {};        ///< to: gradient of the state before the run
};

/// The map and the state of a run.
struct RunMap {
  std::span<const float> map, state;
};

/// Arrays, states and maps are in the memory of the kernel's stream, to which calls are submitted in
/// order.
class RecurrenceKernel {
 public:
  explicit RecurrenceKernel(const RecurrenceShape& shape);
  virtual ~RecurrenceKernel() = default;
  RecurrenceKernel(const RecurrenceKernel&) = delete;
  RecurrenceKernel& operator=(const RecurrenceKernel&) = delete;

  const RecurrenceShape& shape() const { return shape_; }
  virtual Stream& stream() = 0;
  /// The kernel of the convolution before it, of `shape`, on the same stream and threads.
  virtual std::unique_ptr<ConvolutionKernel> convolution(const RecurrenceShape& shape) = 0;
  /// On CPUs, calls `progress` between heads, on the caller's thread.
  virtual void between_heads(const std::function<void()>& /*progress*/) {}
  /// Writes out.
  virtual void forward(const RecurrenceData& data, TokenRun run, const RunStates& states) = 0;
  /// Writes the gradients. Computes the states of chunks again.
  virtual void backward(const RecurrenceData& data, TokenRun run, const RunStates& states) = 0;
  /// map, state <- M, B. Without `map`, B alone.
  virtual void summarize(const RecurrenceData& data, TokenRun run, std::span<float> map,
                         std::span<float> state) = 0;
  /// d_state <- C.
  virtual void summarize_back(const RecurrenceData& data, TokenRun run,
                              std::span<float> d_state) = 0;

  /// into <- M into + B, or Mᵀ into + B.
  virtual void apply(std::span<const float> map, std::span<const float> state, bool transposed,
                     std::span<float> into) = 0;
  /// map, state <- (M2 M1, M2 B1 + B2), or the transposed composition, (M1 M2, M2ᵀ B1 + B2). The
  /// results may be in the place of an argument.
  virtual void join(const RunMap& first, const RunMap& second, bool transposed,
                    std::span<float> map, std::span<float> state) = 0;
  /// The map and state of no tokens: M = 1, B = 0.
  virtual void identity(std::span<float> map, std::span<float> state) = 0;

 protected:
  const RecurrenceShape shape_;
};

/// The kernel for arrays in the memory of `stream`, which must outlive it; `threads` are those of a
/// CPU. Throws a usage error if a GPU's kernel is not of this shape.
std::unique_ptr<RecurrenceKernel> make_recurrence_kernel(const RecurrenceShape& shape, int threads,
                                                         Stream& stream);

}  // namespace gyre
