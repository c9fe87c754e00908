#pragma once
// The k largest logits of a vocabulary sharded over ranks, and their ids.
//
//     each rank   its min(k, columns) largest by (value, then lower id)       one pass
//     all-gather  ids and values, 8 bytes per entry; 6 if the logits are bf16
//     each rank   the k largest of all ranks' lists, merged in the same way
//
// Example, k = 3, ranks hold 5 1 5 | 4 5 2: lists 5 5 1 of ids 0 2 1 and 5 4 2 of ids 4 3 5; merged
// 5 5 5 of ids 0 2 4. Lower ranks hold lower ids, so ties between lists go to the first list.
//
// Padding columns are never returned. NaN ranks as the largest. k = 1 is the argmax. Based on
// distributed_vocab_topk of NeMo RL, which does not define the order of ties.

#include "comm/communicator.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "logprobs/vocab_partition.hpp"

namespace gyre {

class VocabTopK {
 public:
  /// Collective. All ranks throw the same usage error if k < 1, tokens < 0, the partition and `tp`
  /// have different numbers of ranks, or an argument differs between ranks.
  VocabTopK(int64_t tokens, const VocabPartition& vocab, int64_t k, int threads, Communicator& tp,
            RowKernels* kernels = nullptr);

  /// min(k, vocab_size): entries per row.
  int64_t length() const { return length_; }
  /// values, ids [tokens, length()] in descending order, equal values by ascending id, equal on all
  /// ranks, from logits [tokens, own columns] in the kernels' memory, f32 or bf16, alike on all
  /// ranks. Collective: one all-gather. Returns the seconds waited.
  double run(ConstMatrixRef logits, Stream& stream, std::span<float> values,
             std::span<int32_t> ids);

 private:
  int64_t tokens_;
  VocabPartition vocab_;
  int64_t length_;
  int threads_;
  Communicator& tp_;
  RowKernels& kernels_;
};

}  // namespace gyre
