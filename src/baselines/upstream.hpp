#pragma once
// The algorithms that NeMo RL's log-probabilities use (nemo_rl/distributed/model_utils.py), for
// comparison: same results, other costs. Every step of theirs is a pass over a materialised f32
// tensor here too, every collective of theirs a collective.
//
//     log-softmax       max, subtract, exp, sum, subtract: two all-reduces, three f32 temporaries
//     log-probability   a third all-reduce brings the owner's value; the f32 softmax is kept
//     chunked           the same for slices of the rows; backward computes the log-softmax again
//     filtered          an all-to-all turns columns into rows; sort; softmax; an all-gather
//
// Bytes of memory of an element of bf16 logits, forward and backward: log-probability 46 + 22,
// chunked 38 + 110, entropy 62 + 104, K ids 38 + 80, soft cross entropy 92 + 26.
//
// What is not theirs: padded columns take part in nothing, logits of -inf are selected away, ties
// are ordered as in reference.hpp, shards and rows need not divide evenly, and the memory of
// temporaries is kept from call to call, as on a device with a caching allocator. Their sort works
// on 256 rows at once, ours row by row, in cache. Passes run at the speed of memory
// (upstream_passes.hpp).
//
// Gradients are made in f32 and then cast to the type of the output, which may be the logits'
// memory. Arguments are those of the classes that these are compared with, which check them. All
// calls that take a stream are collective. A backward pass follows the forward pass of the same
// logits.

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

/// What the classes below share.
struct Shape {
  int64_t tokens = 0;
  VocabPartition vocab;
  int64_t chunk = 0;  ///< rows of a slice; 0: all at once. Not for soft cross entropy nor filters
  int threads = 1;
};

/// Tensors that come and go, in memory that stays.
class Scratch {
 public:
  /// [rows, cols] in a slot. What was last written there is still there if the size is the same.
  MatrixView<float> tensor(size_t slot, int64_t rows, int64_t cols);
  MatrixView<int64_t> integers(size_t slot, int64_t rows, int64_t cols);

 private:
  std::array<Buffer<float>, 5> tensors_;
  std::array<Buffer<int64_t>, 2> integers_;
};

/// DistributedLogprob and ChunkedDistributedLogprob. Results and arguments as VocabScores with one
/// id a token and no entropy.
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
  Scratch scratch_;  // the softmax [tokens, columns] too unless chunked
};

/// ChunkedDistributedEntropy; Shannon's sign.
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

/// ChunkedDistributedGatherLogprob: K ids a token.
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

/// DistributedCrossEntropy: five all-reduces, two f32 tensors kept.
class SoftCrossEntropy {
 public:
  SoftCrossEntropy(Shape shape, Communicator& tp) : shape_(std::move(shape)), tp_(tp) {}
  void forward(ConstMatrixRef student, ConstMatrixRef teacher, Stream& stream,
               std::span<float> value);
  void backward(std::span<const float> d_value, MatrixRef d_student);

 private:
  Shape shape_;
  Communicator& tp_;
  Scratch scratch_;  // both distributions [tokens, columns] too
};

/// DistributedLogprobWithSampling: logits of type f32 travel as such, bf16 is cast first, as its
/// training paths do. A temperature other than 1 divides the f32 logits. A target that does not
/// survive, or that nobody owns, scores -inf.
class FilteredLogprob {
 public:
  FilteredLogprob(Shape shape, SamplingFilter filter, Communicator& tp);
  void forward(ConstMatrixRef logits, std::span<const int32_t> targets, Stream& stream,
               std::span<float> logprob);
  void backward(std::span<const int32_t> targets, std::span<const float> d_logprob, Stream& stream,
                MatrixRef d_logits);

 private:
  Shape shape_;
  SamplingFilter filter_;
  Communicator& tp_;
  VocabExchange exchange_;
  Scratch scratch_;       // the softmax [own rows, vocab_size] of the survivors too
  Buffer<uint8_t> kept_;  // [own rows, vocab_size]: who survives; empty without a filter
  Buffer<float> own_;     // [own rows] log-probabilities
};

/// distributed_vocab_topk: for each slice two all-gathers, values and int64 ids. values, ids
/// [tokens, min(k, vocab_size)] as VocabTopK.
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
