#pragma once
// Recurrent layers of a decoder on the slots of one rank: what stands between their projections.
//
//     q, k, v <- silu(Σ_j conv[j] x_{t-w+1+j})       causal, of each column; 0 before a document
//     q, k    <- x / sqrt(Σ x² + 1e-6)               of each head
//     beta    <- sigmoid(b)
//     g       <- -exp(a_log) · softplus(a + dt_bias)
//     o       <- gated delta rule of q, k, v, g, beta   (recurrence/kind.hpp), scale key_dim^(-1/2)
//     out     <- o / sqrt(mean(o²) + eps) · o_norm · silu(z)   of each head
//
// This is the linear attention of Qwen3-Next. Such a layer may have another layout than softmax
// attention. Rows of h, the input of the projections, move there and rows of their output back
// (sharding/distributed.hpp): hidden columns instead of those of q, k, v, z, b and a. A part of a
// document that does not begin it also needs the w - 1 rows before it. It gets these rows of h with
// its own and projects them again: they are fewer columns than q, k and v.
//
// Example, cp = 2, one document of 8 tokens, w = 3, from dual-chunk-swap to contiguous:
//
//     rank 0 holds h of 0 1 | 6 7   sends 6 7, gets 2 3     ->  0 1 2 3
//     rank 1 holds h of 2 3 | 4 5   sends 2 3, gets 6 7     ->  4 5 6 7 | 2 3

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "core/matrix_ref.hpp"
#include "model/decoder_steps.hpp"
#include "recurrence/chunk_kernel.hpp"
#include "recurrence/convolution.hpp"
#include "recurrence/execute.hpp"
#include "recurrence/schedules/schedule.hpp"
#include "sharding/distributed.hpp"

namespace gyre {

/// Messages and bytes that a rank sends.
struct RecurrentTraffic {
  int64_t messages = 0, bytes = 0;
  RecurrentTraffic& operator+=(const RecurrentTraffic& other) {
    messages += other.messages;
    bytes += other.bytes;
    return *this;
  }
  friend RecurrentTraffic operator*(int64_t layers, const RecurrentTraffic& one) {
    return {layers * one.messages, layers * one.bytes};
  }
  friend bool operator==(const RecurrentTraffic&, const RecurrentTraffic&) = default;
};

/// The layouts of a bin: that of softmax attention, and that of recurrent layers.
struct RecurrentProblem {
  const Layout& softmax;
  const Layout& recurrent;
  const StateSchedule& schedule;
  const ModelConfig& config;
  int tp = 1;
  DType activations = DType::f32;
};

/// One rank's part of a recurrent layer over a bin, the same in all such layers.
struct RecurrentPlan {
  Layout layout;               ///< of recurrent layers
  std::vector<int64_t> halos;  ///< rows of the halo of each fragment; they lie behind the slots
  SlotMoves there, back;       ///< rows of h, with halos; rows of the output
  StatePlan states;
  const Shard& shard() const { return layout.shard(states.rank); }
  /// Slots and halos.
  int64_t rows() const { return there.slots; }
};

/// The recurrence of such layers: the gated delta rule.
const RecurrenceKind& kind_of_recurrent_layers();
/// Heads of one of `tp` ranks.
RecurrenceShape recurrence_shape(const ModelConfig& config, int tp);

/// Why such layers cannot run under this layout with this schedule; "" if they can.
std::string recurrent_refusal(const RecurrentProblem& problem);
/// Precondition: recurrent_refusal() is empty.
RecurrentPlan plan_recurrent(const RecurrentProblem& problem, int rank);

/// The messages of a rank in one layer, counted from its plan.
RecurrentTraffic count(const RecurrentPlan& plan, const RecurrentProblem& problem);
/// The same without the plan: rows by the owners of slots, states by the closed form of the
/// schedule.
RecurrentTraffic expected_traffic(const RecurrentProblem& problem, int rank);

/// Bytes of a rank's arrays of such a layer that are not activations of the decoder.
int64_t recurrence_bytes(const ModelConfig& config, int tp, int64_t slots);

/// Weights of a layer on one rank, f32.
struct RecurrentWeights {
  ConstMatrixRef conv_q, conv_k, conv_v;  ///< [conv_width, columns]
  std::span<const float> a_log, dt_bias;  ///< [value heads]
  std::span<const float> o_norm;          ///< [value_dim]
};

/// Rows of slots and halos: results of the projections, f32. The norm of a head amplifies errors of
/// an output whose terms cancel, so that nothing is rounded before it.
struct RecurrentInputs {
  MatrixRef q, k, v;  ///< read only
  ConstMatrixRef z, b, a;
};

/// The recurrent layers of a bin, which share arrays and states. In host memory.
class RecurrentLayers {
 public:
  /// All arguments must outlive it.
  RecurrentLayers(const RecurrentPlan& plan, const ModelConfig& config, int tp,
                  Communicator& group);
  /// out [slots, value heads · value_dim]; rows without a token get 0. Returns the seconds of the
  /// recurrence. Collective over the group.
  RecurrenceTimes run(const RecurrentInputs& inputs, const RecurrentWeights& weights,
                      MatrixRef out);

 private:
  /// q, k and v of the recurrence <- convolved q, k and v of the inputs; heads of q and k get a
  /// length of 1.
  void convolve(const RecurrentInputs& inputs, const RecurrentWeights& weights);
  void make_gates(const RecurrentInputs& inputs, const RecurrentWeights& weights);
  void normalise(ConstMatrixRef z, std::span<const float> weight, MatrixRef out);

  const RecurrentPlan& plan_;
  const ModelConfig& config_;
  RecurrenceShape shape_;
  CpuConvolutionKernel convolution_;
  CpuRecurrenceKernel kernel_;
  RecurrenceExecutor executor_;
};

}  // namespace gyre
