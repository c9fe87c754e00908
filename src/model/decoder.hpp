#pragma once
// The decoder under tensor and context parallelism.
//
//     for (step : decoder_steps(config)) do it to the slots of this rank
//
// Context parallelism splits tokens: every rank runs its own slots, and only attention
// communicates, as its plan says. Tensor parallelism (Shoeybi et al., arXiv 1909.08053) splits
// heads, intermediate columns and vocabulary: wq, wk, wv, their biases, sinks, w_gate and w_up by
// columns, wo, w_down, embed and head by rows. All-reduces after embed, wo and w_down sum the
// parts; x is the same on all ranks of a tensor-parallel group. Example, tp = 2, 8 heads over 4 KV
// heads:
//
//     rank 0: heads 0-3, KV heads 0-1, vocabulary [0, V/2)
//     rank 1: heads 4-7, KV heads 2-3, vocabulary [V/2, V)
//
// Recurrent layers (recurrent_layer.hpp) split key heads, and the heads of values that each serves;
// their slots may be others than those of softmax attention.
//
// With more ranks than KV heads, each KV head is replicated on the ranks whose query heads read it.
// Example, tp = 4, 8 heads over 2 KV heads:
//
//     ranks 0, 1: heads 0-1, 2-3, KV head 0          ranks 2, 3: heads 4-5, 6-7, KV head 1
//
// Weights and activations are in the memory space of the decoder's stream. On a device the host
// submits the work of all layers without waiting for it. It waits for the scores, which are merged
// on the device; with staged communication, also for each message.

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/execute.hpp"
#include "comm/process_grid.hpp"
#include "core/model_config.hpp"
#include "logprobs/fused_linear/fused_linear.hpp"
#include "model/decoder_ops.hpp"
#include "model/decoder_steps.hpp"
#include "model/decoder_weights.hpp"
#include "model/recurrent_layer.hpp"
#include "model/rotary.hpp"
#include "sharding/local_batch.hpp"

namespace gyre {

/// A window of attention, and how many layers have it.
struct LayerMask {
  int64_t window = 0;  ///< keys that a query sees, up to and including its own; 0: none
  int64_t layers = 0;
};
/// The distinct masks of the softmax layers, ordered by the first layer that has each. A model
/// without such layers gets one mask without a window.
std::vector<LayerMask> layer_masks(const ModelConfig& config);

/// Head counts of one tensor-parallel rank, for its attention plan. `tp` must be allowed.
HeadShape local_heads(const ModelConfig& config, int tp);
/// Element types of the decoder's attention. If cp > 1, partial results are f32.
ElementTypes attention_types(const DecoderTypes& types, int cp);

/// Time of a forward pass by phase, in seconds on this rank.
struct DecoderTimes {
  double linear = 0;                       ///< matrix products of the layers
  double elementwise = 0;                  ///< embedding, norms, biases, rotation, activations
  double attention = 0;                    ///< block kernel, and packing of messages
  double recurrence = 0;                   ///< its kernel
  double head = 0;                         ///< logits, row statistics and merge
  double attention_wait = 0, tp_wait = 0;  ///< communication that is not overlapped
  double recurrence_wait = 0;              ///< states, and changes of layout
  DecoderTimes& operator+=(const DecoderTimes& other);
  double exposed() const { return attention_wait + tp_wait + recurrence_wait; }
  double total() const { return linear + elementwise + attention + recurrence + head + exposed(); }
};

/// Called with a copy of the residual stream x [slots, hidden] in host memory: index 0 after the
/// embedding, index l after layer l.
using HiddenObserver = std::function<void(int64_t index, MatrixView<const float> x)>;

/// Called with the factors of the logits, in the decoder's memory space: the hidden states h
/// [targets, hidden] after the last norm, which are gone after the pass, and this rank's rows of
/// the head [local_vocab(), hidden].
using HeadObserver = std::function<void(ConstMatrixRef h, ConstMatrixRef head)>;

/// One rank's plans of a bin.
struct BinPlans {
  std::vector<RankPlan> attention;  ///< one for each of layer_masks(); forward steps are used
  std::optional<RecurrentPlan> recurrent;  ///< if the model has recurrent layers
};

/// The score of one prediction.
struct PredictionScore {
  float logprob = 0;
  float entropy = 0;  ///< nats, >= 0
  float kl = 0;       ///< divergence from a teacher (teacher.hpp), nats; 0 without one
};

class Decoder {
 public:
  /// `weights` are in host memory, matrices of type types.activations. The grid's communicators and
  /// `kernel` work in the stream's memory space. Collective over the tp group.
  Decoder(const ModelConfig& config, const DecoderTypes& types, DecoderWeights weights,
          ProcessGrid& grid, BlockKernel& kernel, Stream& stream);
  ~Decoder();

  /// Scores the targets of `batch`: out [targets] (slots without a target get logprob 0; the scores
  /// of padding have no meaning). `plans` are this rank's plans for the batch's layout and
  /// local_heads. All work is complete at return. Collective over the cp and tp groups.
  DecoderTimes forward(const LocalBatch& batch, const BinPlans& plans,
                       std::span<PredictionScore> out, const HiddenObserver& observe = {},
                       const HeadObserver& observe_head = {});
  /// Perturbs the weights of norms in the next passes (DecoderWeights::perturbed_norms), unless
  /// `deviation` is 0. What that changes shows how large rounding errors are.
  void perturb_norms(double deviation, uint64_t seed = 1);
  /// This rank's messages of Relayout and Recurrence steps so far.
  RecurrentTraffic recurrent_traffic() const { return recurrent_traffic_; }

 private:
  struct Workspace;
  void run(const decoder_step::Embed& step, int64_t layer, Workspace& w);
  void run(const decoder_step::AllReduce& step, int64_t layer, Workspace& w);
  void run(const decoder_step::Norm& step, int64_t layer, Workspace& w);
  void run(const decoder_step::Linear& step, int64_t layer, Workspace& w);
  void run(const decoder_step::AddBias& step, int64_t layer, Workspace& w);
  void run(const decoder_step::HeadNorm& step, int64_t layer, Workspace& w);
  void run(const decoder_step::Rope& step, int64_t layer, Workspace& w);
  void run(const decoder_step::Attention& step, int64_t layer, Workspace& w);
  void run(const decoder_step::Relayout& step, int64_t layer, Workspace& w);
  void run(const decoder_step::Recurrence& step, int64_t layer, Workspace& w);
  void run(const decoder_step::GateMultiply& step, int64_t layer, Workspace& w);
  void run(const decoder_step::Again& step, int64_t layer, Workspace& w);
  void run(const decoder_step::Score& step, int64_t layer, Workspace& w);
  /// Makes the executors of a bin's plans. They share arrays, so only one may run at a time.
  std::deque<AttentionExecutor> executors_of(std::span<const RankPlan> plans);
  void show(const HiddenObserver& observe, int64_t index, Workspace& w);
  const float* norm_of(Weight weight, int64_t layer) const;

  ModelConfig config_;
  DecoderTypes types_;
  DecoderWeights weights_;
  DecoderWeights perturbed_;  // norms, or nothing
  ProcessGrid& grid_;
  BlockKernel& kernel_;
  Stream& stream_;
  std::unique_ptr<DecoderOps> ops_;
  std::vector<DecoderStep> steps_;
  Rotary rotary_;
  std::vector<LayerMask> masks_;
  HeadShape heads_;  // heads of this rank
  AttentionWorkspace attention_memory_;
  RecurrentTraffic recurrent_traffic_;
  std::unique_ptr<Communicator> host_tp_;  // null on the host, where the grid's is used
  std::unique_ptr<RowKernels> row_kernels_;
  std::unique_ptr<LinearOps> head_ops_;
  FusedLinear head_;
};

}  // namespace gyre
