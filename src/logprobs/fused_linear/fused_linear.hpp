#pragma once
// Log-probabilities from hidden states, without the whole logits: these exist only as tiles.
//
//     serial:   Z = X W^T            X [n, D] hidden states, W [V, D] weight of the head
//               scores of Z as in vocab_parallel.hpp
//               G = dZ               dX = G W            dW = G^T X
//
//     forward   for each rank's rows of X, own rows first, others after the exchange of X
//                 for each tile of columns: Z tile; its partials are added to those of its rows
//               one all-gather of 12 (16 with entropies) bytes per token (score_records.hpp)
//     backward  for each batch of ranks whose rows fill a tile, own rows last
//                 for each tile: Z tile again; G from the kept values; dX += G W; dW += G^T X
//                 send each part of dX to the owner of its rows while the next is computed
//               own rows: sum of the parts of rank - 1, rank - 2, ..., and the own part
//
// Example, 3 ranks with rows 0 | 1 | 2: rank 1 scores rows 1, then 0 and 2. Backward processes 2,
// then 0, then 1; the gradient of rows 1 is part 0 + part 2 + part 1, in this order in every run.
//
// The time is bound by four products, one forward and three backward, each of 2 · n · D · columns
// FLOPs. bench/fused_linear.cpp compares both passes on the host with these products on whole
// matrices; fused_linear_cuda.hpp describes the cost on a device. Tokens without gradient cost
// nothing in backward. Memory beyond inputs and outputs: X of all ranks, two outgoing parts of dX
// and an incoming one, the records of all ranks, 8 bytes per token with a gradient, and tiles;
// nothing of size n · V. dW is accumulated in f32. Each rank's dW covers its own columns and its
// own tokens; under context or data parallelism it is summed with the other weight gradients. Rows
// are tokens in any order, so packing and context parallelism only need targets from
// sequence_scores.hpp. The number of threads does not change the bits of results. Based on
// ChunkedDistributedHiddenStatesToLogprobs of NeMo RL.

#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/fused_linear/fused_linear_ops.hpp"
#include "logprobs/records/score_records.hpp"
#include "logprobs/rows/row_gradient.hpp"
#include "logprobs/vocab_partition.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

struct LinearOptions {
  int64_t tokens = 0;   ///< n: number of tokens; of all ranks together if sharded
  int64_t hidden = 0;   ///< D
  bool sharded = true;  ///< rows of X are distributed over the ranks (sequence parallelism),
                        ///< evenly, in rank order; otherwise every rank has all rows
  bool entropy = false;
  double temperature = 1;
  double soft_cap = 0;  ///< Z becomes cap · tanh(Z / cap), in forward alone; 0: unchanged
  int threads = 1;
  int64_t tile_rows = 0;     ///< of a tile of logits; 0: that of usual_tile()
  int64_t tile_columns = 0;  ///< 0: those of usual_tile(); may differ between ranks
  LinearOps* ops = nullptr;  ///< performs the computations, in its memory space; null: host
  /// One for each token, instead of `temperature`; empty: that of all.
  std::span<const double> temperatures = {};
};

/// Arrays of a backward pass.
struct LinearGradients {
  std::span<const float> d_logprob;  ///< [tokens], equal on all ranks
  std::span<const float> d_entropy;  ///< [tokens], equal on all ranks; empty: none
  MatrixView<float> d_x;             ///< result [rows(), D]
  MatrixView<float> d_weight;        ///< result [own columns, D]
  bool accumulate = false;           ///< whether to add to d_weight
};

/// Computes scores of targets from x and weight, and gradients of x and weight. These four are in
/// the memory space of options.ops; all else is host memory. `stream` must be the stream of
/// options.ops. On a device, forward returns when its results are complete, backward when all its
/// work is submitted.
class FusedLinear {
 public:
  /// `tp` communicates host memory; `arrays` has its ranks in the same order, for the memory space
  /// of options.ops (null: tp). Collective. All ranks throw the same usage error if the partition
  /// and `tp` have different numbers of ranks, an argument differs between ranks, a size is
  /// negative, hidden is 0, or the temperature or its inverse is not positive and finite in f32.
  FusedLinear(const LinearOptions& options, const VocabPartition& vocab, Communicator& tp,
              Communicator* arrays = nullptr);

  /// Sets the number of tokens, equal on all ranks. No communication; discards the last pass.
  void resize(int64_t tokens);

  /// First row of X of a rank, and number of rows of this rank (all rows if not sharded).
  int64_t first_row(int rank) const;
  int64_t rows() const;

  /// logprob, entropy [tokens] (entropy empty unless requested) <- scores of targets [tokens], from
  /// x [rows(), D] and weight [own columns, D], each f32 or bf16 with any strides. Targets
  /// (global ids; an id that no rank has scores 0), the type of x and the scores are equal on all
  /// ranks. A NaN or overflow in a row of logits makes its scores NaN on all ranks. Padding rows of
  /// the weight are not read. Collective: one exchange of x if sharded, one all-gather. Returns the
  /// seconds that it waited for other ranks.
  double forward(ConstMatrixRef x, ConstMatrixRef weight, std::span<const int32_t> targets,
                 Stream& stream, std::span<float> logprob, std::span<float> entropy);

  /// Computes d_x and d_weight after a forward pass with the same arguments. A target that no rank
  /// has counts like one on another rank. Tokens whose gradients are 0 are skipped, whatever x
  /// holds for them. Collective: the parts of d_x are exchanged, one operation per batch of rows,
  /// and all-gathered if not sharded; x of other ranks is kept from the forward pass. Returns the
  /// seconds that the host waited for other ranks. Precondition: no soft cap.
  double backward(ConstMatrixRef x, ConstMatrixRef weight, std::span<const int32_t> targets,
                  const LinearGradients& gradients, Stream& stream);

 private:
  class Backward;

  /// First row of a rank when rows are distributed, as d_x is even if X is not.
  int64_t assigned_row(int rank) const;
  bool exchanges_x() const { return options_.sharded && tp_.size() > 1; }
  RowScale scale() const;
  int64_t tile_rows() const;
  void check_inputs(ConstMatrixRef x, ConstMatrixRef weight,
                    std::span<const int32_t> targets) const;
  std::unique_ptr<LinearTile> make_tile(DType x, DType weight) const;
  template <class Body>
  void for_each_column_tile(ConstMatrixRef weight, Body body) const;
  /// Sends this rank's rows of X to all ranks; x_ is complete when the returned Work is.
  WorkPtr gather_x(ConstMatrixRef x, Stream& stream);
  ConstMatrixRef all_x(ConstMatrixRef x) const;
  /// Adds rows [begin, end) of x to the records, tile by tile; progresses `other` between tiles.
  void score(LinearTile& tile, ConstMatrixRef x, ConstMatrixRef weight, int64_t begin, int64_t end,
             Work& other);
  double share_d_x(MatrixView<const float> own, Stream& stream, MatrixView<float> d_x) const;

  LinearOptions options_;
  VocabPartition vocab_;
  Communicator& tp_;      // in host memory
  Communicator& arrays_;  // in the matrices' memory space
  LinearOps& ops_;
  std::unique_ptr<ScoreRecords> records_;
  Buffer<float> scales_;               // [tokens] 1 / temperature of each, or empty: one for all
  Buffer<RowNormalizer> normalizers_;  // [tokens]
  Buffer<float> entropy_;              // [tokens] or empty
  Buffer<std::byte> x_;                // [tokens, hidden] of all ranks, if exchanged
  DType x_type_ = DType::f32;
};

}  // namespace gyre
