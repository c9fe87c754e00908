#pragma once
// Baselines: the algorithms of NeMo RL's log-probabilities (nemo_rl/distributed/model_utils.py),
// with the same results at other costs. Each of their steps is a pass over a materialised f32
// tensor here too, and each of their collectives a collective.
//
//     log-softmax       max, subtract, exp, sum, subtract: two all-reduces, three f32 temporaries
//     log-probability   a third all-reduce brings the owner's value; the f32 softmax is kept
//     chunked           the same for slices of the rows; backward computes the log-softmax again
//     filtered          an all-to-all turns columns into rows; sort; softmax; an all-gather
//
// Memory traffic in bytes per element of bf16 logits, forward + backward: log-probability 46 + 22,
// chunked 38 + 110, entropy 62 + 104, K ids 38 + 80, soft cross entropy 92 + 26.
//
// Differences: padded columns are excluded, logits of -inf contribute nothing, ties are ordered as
// in reference.hpp, shards and rows need not divide evenly, and the memory of temporaries is kept
// from call to call, as on a device with a caching allocator. Their sort works on 256 rows at once,
// ours row by row, in cache. Passes run at memory bandwidth (upstream_passes.hpp).
//
// Gradients are made in f32 and then cast to the type of the output, which may be the logits'
// memory. Arguments are those of the classes in src/logprobs with which the baselines are compared;
// those check them. All calls that take a stream are collective. A backward pass must follow the
// forward pass of the same logits.

#include <array>
#include <cstdint>
#include <span>

#include "comm/communicator.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_exchange.hpp"
#include "logprobs/vocab_partition.hpp"
#include "runtime/buffer.hpp"

namespace gyre::upstream {

/// Shape of the inputs, common to the classes below.
struct Shape {
  int64_t tokens = 0;
  VocabPartition vocab;
  int64_t chunk = 0;  ///< rows per slice; 0: all at once. Ignored by soft cross entropy and filters
  int threads = 1;
};

/// Temporary tensors, in memory that is kept from call to call.
class Scratch {
 public:
  /// A tensor [rows, cols] in a slot, which keeps its contents between calls with the same size.
  MatrixView<float> tensor(size_t slot, int64_t rows, int64_t cols);
  MatrixView<int64_t> integers(size_t slot, int64_t rows, int64_t cols);

 private:
  std::array<Buffer<float>, 5> tensors_;
  std::array<Buffer<int64_t>, 2> integers_;
};

/// DistributedLogprob and ChunkedDistributedLogprob of NeMo RL. Results and arguments are those of
/// VocabScores with one id per token and no entropy.
class Logprob {
 public:
  Logprob(Shape shape, Communicator& tp) : shape_(std::move(shape)), tp_(tp) {}
  void forward(ConstMatrixRef logits, std::span<const int32_t> targets, Stream& stream,
               std::span<float> logprob);
  void backward(ConstMatrixRef logits, std::span<const int32_t> targets,
                std::span<const float> d_logprob, Stream& stream, MatrixRef d_logits);

 private:
  Shape shape_;
  Communicator& tp_;
  Scratch scratch_;  // also keeps the softmax [tokens, columns] unless chunked
};

/// ChunkedDistributedEntropy of NeMo RL, but with Shannon's sign.
class Entropy {
 public:
  Entropy(Shape shape, Communicator& tp) : shape_(std::move(shape)), tp_(tp) {}
  void forward(ConstMatrixRef logits, Stream& stream, std::span<float> entropy);
  void backward(ConstMatrixRef logits, std::span<const float> d_entropy, Stream& stream,
                MatrixRef d_logits);

 private:
  Shape shape_;
  Communicator& tp_;
  Scratch scratch_;
};

/// ChunkedDistributedGatherLogprob of NeMo RL: K ids per token.
class GatherLogprob {
 public:
  GatherLogprob(Shape shape, int64_t picks, Communicator& tp)
      : shape_(std::move(shape)), picks_(picks), tp_(tp) {}
  void forward(ConstMatrixRef logits, std::span<const int32_t> ids, Stream& stream,
               std::span<float> logprob);
  void backward(ConstMatrixRef logits, std::span<const int32_t> ids,
                std::span<const float> d_logprob, Stream& stream, MatrixRef d_logits);

 private:
  Shape shape_;
  int64_t picks_;
  Communicator& tp_;
  Scratch scratch_;
};

/// DistributedCrossEntropy of NeMo RL: five all-reduces, two f32 tensors kept for backward.
class SoftCrossEntropy {
 public:
  SoftCrossEntropy(Shape shape, Communicator& tp) : shape_(std::move(shape)), tp_(tp) {}
  void forward(ConstMatrixRef student, ConstMatrixRef teacher, Stream& stream,
               std::span<float> value);
  void backward(std::span<const float> d_value, MatrixRef d_student);

 private:
  Shape shape_;
  Communicator& tp_;
  Scratch scratch_;  // also keeps both distributions [tokens, columns]
};

/// DistributedLogprobWithSampling of NeMo RL. f32 logits are sent as f32; bf16 logits are cast
/// first, as in its training paths. A temperature other than 1 divides the f32 logits. A target
/// that does not survive the filter, or that no rank owns, scores -inf.
class FilteredLogprob {
 public:
  FilteredLogprob(Shape shape, SamplingFilter filter, Communicator& tp);
  void forward(ConstMatrixRef logits, std::span<const int32_t> targets, Stream& stream,
               std::span<float> logprob);
  void backward(std::span<const int32_t> targets, std::span<const float> d_logprob, Stream& stream,
                MatrixRef d_logits);
  /// Survivors per token in the last forward pass, [tokens]. Collective: one all-gather.
  std::vector<int32_t> survivors(Stream& stream) const;

 private:
  /// For each rank, the bytes of an array with 4 bytes for each of the rank's rows.
  std::vector<int64_t> bytes_of_rows() const;

  Shape shape_;
  SamplingFilter filter_;
  Communicator& tp_;
  VocabExchange exchange_;
  Scratch scratch_;       // also keeps the softmax [own rows, vocab_size] of the survivors
  Buffer<uint8_t> kept_;  // [own rows, vocab_size]: 1 for survivors; empty without a filter
  Buffer<float> own_;     // [own rows] log-probabilities
};

/// distributed_vocab_topk of NeMo RL: two all-gathers per slice, of values and of int64 ids.
/// values, ids [tokens, min(k, vocab_size)] as in VocabTopK.
class TopK {
 public:
  TopK(Shape shape, int64_t k, Communicator& tp) : shape_(std::move(shape)), k_(k), tp_(tp) {}
  void run(ConstMatrixRef logits, Stream& stream, std::span<float> values, std::span<int32_t> ids);

 private:
  Shape shape_;
  int64_t k_;
  Communicator& tp_;
  Scratch scratch_;
};

}  // namespace gyre::upstream
