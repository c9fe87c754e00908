#pragma once
// Exchange between logits sharded by columns and logits sharded by rows.
//
//     rank r has [tokens, its columns]                      rank r has [its rows, all columns]
//         0 | 1 | 2                                                0 0 0
//         0 | 1 | 2              to_sequence  ->                   -----
//         0 | 1 | 2              <-  to_vocab                      1 1 1
//                                                                  -----
//                                                                  2 2 2
//
// One grouped exchange with at most one message per rank. On the host, the communicator gets the
// blocks of a message in place, so neither side makes a permuted copy. On a device this holds for
// blocks without gaps between their rows; a block with gaps would be one message per row, so one
// kernel per rank copies it on the side that has the gaps. The rank copies its own block during the
// exchange. Rows are distributed in order and evenly. The two directions are exact inverses:
// all_to_all_vp2sq and all_to_all_sq2vp of NeMo RL, without the requirement that the number of
// ranks divides tokens and columns.
//
// Link bandwidth bounds the time: (n - 1) / n of its matrix leave a rank, of n ranks. On a device,
// each side with gaps also reads, writes and allocates as many bytes.

#include "comm/communicator.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/vocab_partition.hpp"

namespace gyre {

class VocabExchange {
 public:
  /// Collective. All ranks throw the same usage error if the partition and `tp`, in host memory,
  /// differ in number of ranks, tokens < 0, or an argument differs between ranks. Matrices are in
  /// the memory space of `arrays`, a communicator of the same ranks in the same order; null: tp.
  VocabExchange(int64_t tokens, const VocabPartition& vocab, DType type, Communicator& tp,
                Communicator* arrays = nullptr);

  /// First row of a rank; its rows end at the first row of the next rank.
  int64_t first_row(int rank) const;
  int64_t rows() const;  ///< number of rows of this rank

  /// by_rows [rows(), padded columns] <- by_columns [tokens, own columns]. Any strides. Collective.
  /// `stream` has the matrices' memory space; a device accesses them in its order.
  void to_sequence(ConstMatrixRef by_columns, Stream& stream, MatrixRef by_rows) const;
  /// by_columns <- by_rows: the inverse of to_sequence().
  void to_vocab(ConstMatrixRef by_rows, Stream& stream, MatrixRef by_columns) const;

 private:
  int64_t rows_of(int rank) const;
  void check(ConstMatrixRef by_columns, ConstMatrixRef by_rows) const;

  int64_t tokens_;
  VocabPartition vocab_;
  DType type_;
  Communicator& tp_;  // in the matrices' memory space
};

}  // namespace gyre
