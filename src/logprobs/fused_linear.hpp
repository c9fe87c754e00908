#pragma once
// From hidden states to log-probabilities without logits: they exist tile by tile.
//
//     serial:   Z = X W^T            X [n, D] hidden states, W [V, D] the head's weight
//               scores of Z as in vocab_parallel.hpp
//               G = dZ               dX = G W            dW = G^T X
//
//     forward   for each rank's rows of X, own rows first, the others' as they arrive
//                 for each tile of columns: Z tile; its moments join those of its rows
//               one all-gather of 12 (16 with entropies) bytes a token (score_records.hpp)
//     backward  for each rank's rows, of as many ranks at a time as fill a tile, own rows last
//                 for each tile: Z tile again; G from what was kept; dX += G W; dW += G^T X
//                 send each part of dX to the rank whose rows they are, while the next are computed
//               the own rows are the sum of the parts of rank - 1, rank - 2, ..., and the own one
//
// Example, 3 ranks, rows dealt as 0 | 1 | 2: rank 1 scores rows 1, then 0 and 2. Backward it does
// 2, then 0, then 1; the gradient of its rows is part 0 + part 2 + part 1, in this order in every
// run.
//
// Four products of 2 n D columns FLOPs each are the limit (one forward, three backward). Measured
// on the host in bench/fused_linear.cpp: 0.8 to 0.95 times the four as single calls, which leave
// the cache; fused_linear_cuda.hpp says what a device adds.
// Tokens without a gradient cost nothing backward. Memory beyond inputs and outputs: X of all
// ranks, two parts of dX that leave and one that comes, the records of all ranks, 8
// bytes a token with a gradient, and tiles, nothing of size n · V. dW is accumulated in f32. Each
// rank's dW is of its own columns and its own tokens: under context or data parallelism it is
// summed with the other gradients of weights. Rows are tokens in any order, so that packing and
// context parallelism need nothing more than targets from sequence_scores.hpp. Bits do not depend
// on the number of threads. After ChunkedDistributedHiddenStatesToLogprobs of NeMo RL.

#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/fused_linear_ops.hpp"
#include "logprobs/row_gradient.hpp"
#include "logprobs/score_records.hpp"
#include "logprobs/vocab_partition.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

struct LinearOptions {
  int64_t tokens = 0;   ///< n: of all ranks of the group together when sharded
  int64_t hidden = 0;   ///< D
  bool sharded = true;  ///< rows of X are dealt over the ranks (sequence parallelism), as evenly as
                        ///< can be, in rank order; otherwise every rank has all of them
  bool entropy = false;
  double temperature = 1;
  int threads = 1;
  int64_t tile_rows = 0;     ///< of a tile of logits; 0: as `ops` would have it
  int64_t tile_columns = 0;  ///< likewise; ranks may differ
  LinearOps* ops = nullptr;  ///< what computes, and with it where matrices lie; null: the host
};

/// x, weight and their gradients lie in the memory of options.ops, and are read and written in the
/// order of its stream, which is the `stream` of every call; all else is host memory. Where that is
/// a device's, forward returns when its results are there, backward when all is submitted.
class FusedLinear {
 public:
  /// `tp` is of host memory; `arrays`, of the same ranks in the same order, of that of options.ops;
  /// null: tp. Collective; all ranks throw the same usage error when the partition is not of as
  /// many ranks as `tp`, when an argument differs between ranks, when a size is negative or hidden
  /// is 0, or unless the temperature and its inverse in f32 are positive and finite.
  FusedLinear(const LinearOptions& options, const VocabPartition& vocab, Communicator& tp,
              Communicator* arrays = nullptr);

  /// First row of a rank's rows of X, and how many this rank has (all when not sharded).
  int64_t first_row(int rank) const;
  int64_t rows() const;

  /// logprob, entropy [tokens] (the latter empty unless asked for), on all ranks alike <- x
  /// [rows(), D] and weight [own columns, D], each f32 or bf16 (x alike on all ranks), any strides;
  /// targets [tokens], alike on all ranks (global ids; nobody's scores 0). A NaN or an overflow in
  /// a row of logits makes its scores NaN on all ranks. Rows of the weight that are padding are not
  /// read. Collective: one exchange of x when sharded, one all-gather. Returns the seconds waited
  /// for other ranks.
  double forward(ConstMatrixRef x, ConstMatrixRef weight, std::span<const int32_t> targets,
                 Stream& stream, std::span<float> logprob, std::span<float> entropy);

  /// d_x [rows(), D] and d_weight [own columns, D] <- gradients from those of logprob [tokens] and
  /// entropy [tokens] (empty: none), after a forward pass of the same arguments; gradients are
  /// alike on all ranks. With `accumulate`, d_weight is added to. The g of a target that nobody has
  /// counts, as if it were a column elsewhere. Tokens whose gradients are 0 take no part, whatever
  /// they hold. Collective: the parts of d_x are exchanged, one operation for each group of rows,
  /// and all-gathered when not sharded; x of other ranks is kept from the forward pass. Returns the
  /// seconds that the host waited for other ranks.
  double backward(ConstMatrixRef x, ConstMatrixRef weight, std::span<const int32_t> targets,
                  std::span<const float> d_logprob, std::span<const float> d_entropy,
                  Stream& stream, MatrixView<float> d_x, MatrixView<float> d_weight,
                  bool accumulate = false);

 private:
  class Backward;

  /// First row of a rank when rows are dealt, which those of d_x are in any case.
  int64_t dealt_row(int rank) const;
  bool exchanges_x() const { return options_.sharded && tp_.size() > 1; }
  float scale() const;
  void check_inputs(ConstMatrixRef x, ConstMatrixRef weight,
                    std::span<const int32_t> targets) const;
  std::unique_ptr<LinearTile> make_tile(DType x, DType weight) const;
  template <class Body>
  void for_each_column_tile(ConstMatrixRef weight, Body body) const;
  /// Sends the own rows of X to all ranks; x_ is complete when the work is.
  WorkPtr gather_x(ConstMatrixRef x, Stream& stream);
  ConstMatrixRef all_x(ConstMatrixRef x) const;
  /// Adds rows [begin, end) of x to the records, tile by tile; drives `other` meanwhile.
  void score(LinearTile& tile, ConstMatrixRef x, ConstMatrixRef weight, int64_t begin, int64_t end,
             Work& other);
  double share_d_x(MatrixView<const float> own, Stream& stream, MatrixView<float> d_x) const;

  LinearOptions options_;
  VocabPartition vocab_;
  Communicator& tp_;      // of host memory
  Communicator& arrays_;  // of that of the matrices
  LinearOps& ops_;
  std::unique_ptr<ScoreRecords> records_;
  Buffer<RowNormalizer> normalizers_;  // [tokens]
  Buffer<float> entropy_;              // [tokens] or empty
  Buffer<std::byte> x_;                // [tokens, hidden] of all ranks, if they exchange it
  DType x_type_ = DType::f32;
};

}  // namespace gyre
