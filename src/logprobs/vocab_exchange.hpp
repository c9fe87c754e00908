#pragma once
// Logits split by columns into logits split by rows, and back.
//
//     rank r has [tokens, its columns]                      rank r has [its rows, all columns]
//         0 | 1 | 2                                                0 0 0
//         0 | 1 | 2              to_sequence  ->                   -----
//         0 | 1 | 2              <-  to_vocab                      1 1 1
//                                                                  -----
//                                                                  2 2 2
//
// One grouped exchange, with at most one message to each rank. On the host the communicator gets
// the blocks of a message in place, so that neither side makes a permuted copy. On a device this
// holds for blocks without gaps between their rows; a block with gaps would be a message for each
// row, so one kernel for each rank copies it on the side that has the gaps. The rank copies its own
// block during the exchange. Rows are distributed in order, as evenly as possible. The two
// directions are exact inverses: all_to_all_vp2sq and all_to_all_sq2vp of NeMo RL, without their
// condition that the number of ranks divides tokens and columns.
//
// Limit: the bytes that leave a rank, (n - 1) / n of its matrix, over the bandwidth of its link. On
// a device each side with gaps also reads and writes that many bytes in memory, and allocates them.

#include "comm/communicator.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/vocab_partition.hpp"

namespace gyre {

class VocabExchange {
 public:
  /// Collective; all ranks throw the same usage error when the partition is not of as many ranks as
  /// `tp`, a communicator of host memory, or when an argument differs between ranks. Matrices lie
  /// in the memory of `arrays`, a communicator of the same ranks in the same order; null: tp.
  VocabExchange(int64_t tokens, const VocabPartition& vocab, DType type, Communicator& tp,
                Communicator* arrays = nullptr);

  /// The first row of a rank, which has the rows up to the first one of the next rank.
  int64_t first_row(int rank) const;
  int64_t rows() const;  ///< of this rank

  /// by_rows [rows(), padded columns] <- by_columns [tokens, own columns]. Any strides. Collective.
  /// `stream` is one of the matrices' memory; on a device they are read and written in its order.
  void to_sequence(ConstMatrixRef by_columns, Stream& stream, MatrixRef by_rows) const;
  /// The inverse.
  void to_vocab(ConstMatrixRef by_rows, Stream& stream, MatrixRef by_columns) const;

 private:
  int64_t rows_of(int rank) const;
  void check(ConstMatrixRef by_columns, ConstMatrixRef by_rows) const;

  int64_t tokens_;
  VocabPartition vocab_;
  DType type_;
  Communicator& tp_;  // of the matrices' memory
};

}  // namespace gyre
