#pragma once
// Log-probabilities under a sampling filter (temperature, top-k, min-p, top-p), one for all rows or
// one for each, from a vocabulary that is sharded over ranks: no rank ever holds a full row.
//
// A filter is a threshold: columns above it survive, and some of those equal to it (SamplingFilter
// in reference.hpp defines which). One pass computes each rank's partials and its M largest logits.
// One all-gather of M values and 16 bytes per token then lets every rank find the same threshold:
//
//     walk down the values of all ranks' lists and accumulate their probabilities (relative to the
//     exact sum over the whole vocabulary); stop at the k-th value, or where the sum reaches top_p
//
// A list is incomplete if its rank has more columns than the list has entries. The threshold is
// exact if it is not below the last value of any incomplete list: every larger value is then in
// some list, and each list records how often its last value occurs. With top-k, M = k, and the
// threshold is always exact. With min-p the walk ends at the least value that min_p keeps, and
// top_p is of what lies above it. Rows without an exact threshold are searched together:
//
//     key = an integer in the order of the values
//     range = keys below the last values of incomplete lists and above a bound, below which the
//             total probability is negligible (with min-p: keys of values that min_p keeps)
//     until one key is left:
//         split the range into 256 parts; sum the probabilities of the columns in each part, over
//         all ranks and as integers, so that the order does not matter; continue in the part where
//         the cumulative sum from above reaches top_p
//
// This takes at most 2 rounds for bf16 and 4 for f32, usually 1 and 3, then one all-gather of
// counts.
//
// Example, M = 2, top_p = 0.9, ranks hold 5 1 0 | 4 3 2: lists 5 1 and 4 3; p = .63 .23 .09 .03 ..
//     5 and 4 sum to 0.87, with 3 to 0.95 >= 0.9: threshold 3, not below 3 or 1: exact
//
// 16 bytes per token are kept for backward, which needs no communication. Based on
// DistributedLogprobWithSampling of NeMo RL, which moves whole rows by an all-to-all.

#include <algorithm>
#include <memory>
#include <vector>

#include "comm/communicator.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/rows/row_gradient.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "logprobs/score_detail.hpp"
#include "logprobs/vocab_partition.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

struct FilterOptions {
  SamplingFilter filter;
  int64_t list_length = 64;  ///< M, at least 1; a row with top_k needs top_k entries instead
  int threads = 1;
  RowKernels* kernels = nullptr;  ///< as in ScoreOptions
  /// One for each token, instead of `filter`; empty: that of all.
  std::span<const SamplingFilter> filters = {};
};

/// Entries of the lists of largest logits that the ranks exchange.
int64_t filter_list_length(const FilterOptions& options, const VocabPartition& vocab);

class FilteredScores {
 public:
  /// Collective. All ranks throw the same usage error if `vocab` and `tp` differ in number of
  /// ranks, an argument differs between ranks, top_k is negative or above the vocabulary size,
  /// top_p is not in (0, 1] or min_p not in [0, 1], the temperature or its inverse is not positive
  /// and finite in f32, there are filters but not one for each token, tokens < 0, list_length < 1,
  /// or the type is not f32 or bf16. `type` is that of the logits and of the lists.
  FilteredScores(int64_t tokens, const VocabPartition& vocab, DType type,
                 const FilterOptions& options, Communicator& tp);

  /// logprob [tokens] <- log-probability of targets [tokens] (global ids, equal on all ranks) among
  /// the survivors, from logits [tokens, own columns]; -inf if the target does not survive or no
  /// rank has it. NaN for a row with NaN or +inf, or with only -inf. Collective: one all-gather;
  /// for rows whose lists are too short, also one all-reduce per round of the search and one
  /// all-gather. Returns the seconds waited.
  double forward(ConstMatrixRef logits, std::span<const int32_t> targets, Stream& stream,
                 std::span<float> logprob);
  /// d_logits [tokens, columns] <- gradient from d_logprob [tokens]: 0 for columns that did not
  /// survive, else g ({v = target} - p_v) / temperature. May be the logits' memory.
  void backward(ConstMatrixRef logits, std::span<const int32_t> targets,
                std::span<const float> d_logprob, MatrixRef d_logits) const;

  /// Number of survivors in the last forward pass, over all ranks: [tokens]; 0 for a NaN row.
  std::span<const int32_t> survivors() const { return kept_.span(); }
  /// Number of rows of the last forward pass whose lists were too short.
  int64_t rows_by_digits() const { return rows_by_digits_; }

 private:
  class Forward;

  const SamplingFilter& filter(int64_t token) const {
    return filters_.empty() ? options_.filter : filters_[token];
  }
  /// Whether some row has a filter for which `has` is true.
  template <class Has>
  bool any_filter(Has has) const {
    return filters_.empty() ? has(options_.filter) : std::ranges::any_of(filters_, has);
  }
  RowScale scale() const {
    return {scale_of(options_.filter.temperature), scales_of_rows(scales_)};
  }

  int64_t tokens_;
  VocabPartition vocab_;
  DType type_;
  FilterOptions options_;
  std::vector<SamplingFilter> filters_;  // [tokens], or empty: one for all
  Buffer<float> scales_;                 // [tokens] 1 / temperature, or empty: one for all
  Communicator& tp_;
  RowKernels& kernels_;
  int64_t length_ = 1;                 // entries per list
  Buffer<RowNormalizer> normalizers_;  // [tokens] normalizers of the survivors
  Buffer<RowSurvivors> survivors_;     // [tokens] for this shard
  Buffer<int32_t> kept_;               // [tokens]
  int64_t rows_by_digits_ = 0;
};

}  // namespace gyre
