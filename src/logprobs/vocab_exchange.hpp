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
// One grouped exchange, at most one message to each rank. On the host, the blocks of a message are
// described to the communicator where they lie, so that neither side makes a permuted copy. On a
// device that is done for blocks without gaps between their rows; others would be a message for
// each row, and go through a copy on the side that has the gaps, by one kernel a rank. The own
// block is copied meanwhile. Rows are dealt in order, as evenly as they can be; both directions are
// exact inverses. all_to_all_vp2sq and all_to_all_sq2vp of NeMo RL, without their condition that
// ranks divide tokens and columns.
//
// Limit: what leaves a rank, (n - 1) / n of its matrix, over the bandwidth of its link. On a
// device, each side with gaps besides reads and writes that much memory once more, and has copies
// of it.

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

  /// First row of a rank, which has those up to the next rank's.
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
