#pragma once
// The chunked kernel of a recurrence on CPUs: all heads of a run of tokens of one document.
//
// A run changes a state by an affine map: S_out = M S_in + B. Backward it is the transpose of M, and
// C, which does not depend on states: dS_in = Mᵀ dS_out + C. States and their gradients are f32,
// [value_heads, key_dim, value_dim]; maps are f32, [value_heads, map_elements()].

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "recurrence/chunk.hpp"

namespace gyre {

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

class RecurrenceKernel {
 public:
  RecurrenceKernel(const RecurrenceShape& shape, int threads);

  const RecurrenceShape& shape() const { return shape_; }
  int threads() const { return threads_; }
  /// Calls `progress` between heads, on the caller's thread.
  void between_heads(std::function<void()> progress) { progress_ = std::move(progress); }
  /// Writes out.
  void forward(const RecurrenceData& data, TokenRun run, const RunStates& states);
  /// Writes the gradients. Computes the states of chunks again.
  void backward(const RecurrenceData& data, TokenRun run, const RunStates& states);
  /// map, state <- M, B. Without `map`, B alone.
  void summarize(const RecurrenceData& data, TokenRun run, std::span<float> map,
                 std::span<float> state);
  /// d_state <- C.
  void summarize_back(const RecurrenceData& data, TokenRun run, std::span<float> d_state);

  /// into <- M into + B, or Mᵀ into + B.
  void apply(std::span<const float> map, std::span<const float> state, bool transposed,
             std::span<float> into) const;
  /// map, state <- (M2 M1, M2 B1 + B2), or the transposed composition, (M1 M2, M2ᵀ B1 + B2). The
  /// results may be in the place of an argument.
  void join(const RunMap& first, const RunMap& second, bool transposed, std::span<float> map,
            std::span<float> state) const;
  /// The map and state of no tokens: M = 1, B = 0.
  void identity(std::span<float> map, std::span<float> state) const;

 private:
  struct Scratch {
    RecurrenceChunk narrow, wide;  ///< for states, and for [B | M]
    std::vector<float> state;
    std::vector<float> states;    ///< [chunks, key_dim, value_dim]
    std::vector<float> d_q, d_k;  ///< [tokens of the run, key_dim] of a key head
  };
  void backward_head(const RecurrenceData& data, TokenRun run, const RunStates& states,
                     int64_t head, Scratch& scratch);

  /// Calls body(head, thread) for every head.
  void for_each_head(int64_t heads, const std::function<void(int64_t, int)>& body);

  RecurrenceShape shape_;
  int threads_;
  std::function<void()> progress_;
  std::vector<std::unique_ptr<Scratch>> scratch_;  // [threads]
};

}  // namespace gyre
