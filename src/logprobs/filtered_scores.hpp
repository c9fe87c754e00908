#pragma once
// Log-probabilities under a sampling filter (temperature, top-k, top-p) from a vocabulary that is
// split over ranks, which it stays: no rank ever holds a row.
//
// A filter is a threshold: the columns above it survive, and some of those equal to it
// (SamplingFilter in reference.hpp says which). One pass gives each rank its moments and its M
// largest logits. One all-gather of these, M values and 16 bytes for each token, lets every rank
// find the same threshold:
//
//     walk down the values of all ranks' lists and add up their probabilities (relative to the
//     exact sum over the whole vocabulary); stop at the k-th value, or where the sum reaches top_p
//
// A list is incomplete if its rank has more columns than the list has entries. The threshold is
// exact if it is not below the last value of any incomplete list: then every larger value is in
// some list, and each list says how often its last value occurs. With top-k, M = k, and the
// threshold is always exact. The rows whose threshold is not exact are searched together:
//
//     key = an integer in the order of the values
//     range = the keys below those last values and above a bound, below which the probabilities add
//             up to too little to matter
//     until one key is left:
//         cut the range into 256 parts; sum the probabilities of the columns in each part, over all
//         ranks and as integers, so that the order does not matter; go on in the part where the sum
//         from above reaches top_p
//
// This takes at most 2 rounds for bf16 and 4 for f32, usually 1 and 3, then one all-gather of
// counts.
//
// Example, M = 2, top_p = 0.9, ranks hold 5 1 0 | 4 3 2: lists 5 1 and 4 3; p = .64 .24 .09 .03 ..
//     5 and 4 make 0.88, 3 more 0.97 >= 0.9: threshold 3, not below 3 or 1: exact
//
// 16 bytes a token are kept for backward, which needs no communication.
// After DistributedLogprobWithSampling of NeMo RL, which moves whole rows by an all-to-all.

#include <memory>

#include "comm/communicator.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/row_gradient.hpp"
#include "logprobs/row_kernels.hpp"
#include "logprobs/score_detail.hpp"
#include "logprobs/vocab_partition.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

struct FilterOptions {
  SamplingFilter filter;
  int64_t list_length = 64;  ///< M, at least 1; with top_k, lists are that long instead
  int threads = 1;
  RowKernels* kernels = nullptr;  ///< as in ScoreOptions
};

class FilteredScores {
 public:
  /// Collective; all ranks throw the same usage error when the partition is not of as many ranks,
  /// when an argument differs, when top_k is negative or more than the vocabulary, when top_p is
  /// not in (0, 1], unless the temperature and its inverse are positive and finite in f32, when
  /// tokens < 0 or list_length < 1, or when the type is not f32 or bf16. `type` is that of the
  /// logits; lists travel in it.
  FilteredScores(int64_t tokens, const VocabPartition& vocab, DType type,
                 const FilterOptions& options, Communicator& tp);

  /// logprob [tokens] <- log-probability of targets [tokens] (global ids, on all ranks alike) among
  /// the survivors, from logits [tokens, own columns]; -inf if it is not one of them, or nobody's.
  /// NaN for a row with a NaN or +inf, or with nothing but -inf. Collective: one all-gather, and
  /// for rows whose lists are too short one all-reduce a round and one more all-gather. Returns the
  /// seconds waited.
  double forward(ConstMatrixRef logits, std::span<const int32_t> targets, Stream& stream,
                 std::span<float> logprob);
  /// d_logits [tokens, columns] <- the gradient from d_logprob [tokens]: 0 for what did not
  /// survive; -g p_v for what did, also where the target did not. May be the logits' memory.
  void backward(ConstMatrixRef logits, std::span<const int32_t> targets,
                std::span<const float> d_logprob, MatrixRef d_logits) const;

  /// Columns that survived in the last forward pass, over all ranks: [tokens]; 0 for a row that is
  /// NaN.
  std::span<const int32_t> survivors() const { return kept_.span(); }
  /// Rows of the last forward pass whose lists were too short.
  int64_t rows_by_digits() const { return rows_by_digits_; }

 private:
  class Forward;

  bool by_count() const { return options_.filter.top_k > 0; }
  bool by_mass() const { return options_.filter.top_p != 1; }
  float scale() const { return scale_of(options_.filter.temperature); }

  int64_t tokens_;
  VocabPartition vocab_;
  DType type_;
  FilterOptions options_;
  Communicator& tp_;
  RowKernels& kernels_;
  int64_t length_ = 1;                 // entries of a list
  Buffer<RowNormalizer> normalizers_;  // [tokens] of the survivors
  Buffer<RowSurvivors> survivors_;     // [tokens] of this shard
  Buffer<int32_t> kept_;               // [tokens]
  int64_t rows_by_digits_ = 0;
};

}  // namespace gyre
