#pragma once
// Passes over a shard that project its probabilities by a sparse matrix, one row of weights for
// each column of the shard.
//
//     forward    q_v = exp((z_v - max) · scale) / sum       over this shard's valid columns alone
//                out_c = Σ_v q_v M_vc                       read by the columns of M
//     backward   g_v = Σ_c M_vc d_c                         read by the rows of M
//                dz_v = scale p_v (g_v - Σ_c d_c out_c)     with p and out over all shards
//
// Σ_u p_u g_u over all shards is Σ_c d_c out_c, because M is linear: the centre of a gradient needs
// no sum over the vocabulary.
//
// Sums are f64, but on GPUs g_v is f32. A row with d = 0 is not read and gets zeros; others with a
// normaliser that is not finite become NaN; padding columns get 0.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/matrix_ref.hpp"
#include "core/sparse_matrix.hpp"
#include "logprobs/rows/row_gradient.hpp"
#include "logprobs/rows/row_statistics.hpp"

namespace gyre {

/// The rows of a matrix that belong to the columns of a shard, by rows and by columns.
struct ProjectionShard {
  struct Entry {
    int32_t at = 0;  ///< column of the matrix, or of the shard
    float weight = 0;
  };
  int64_t width = 0;                               ///< number of columns of the matrix
  std::vector<int32_t> row_offsets{0};             ///< [valid columns of the shard + 1]
  std::vector<int32_t> column_offsets;             ///< [width + 1]
  std::vector<Entry> by_row = {}, by_column = {};  ///< [entries], in ascending order of the other

  /// Rows [first, first + count) of a matrix without a fault.
  ProjectionShard(const SparseMatrixRef& matrix, int64_t first, int64_t count);
  int64_t columns() const { return std::ssize(row_offsets) - 1; }
};

/// The passes with one matrix. Matrices are in the memory space of the kernels that made this, the
/// spans in host memory (row_kernels.hpp).
class RowProjection {
 public:
  virtual ~RowProjection() = default;
  /// partials [rows] <- softmax_partials; out [rows, width] <- the shard's own projection, 0 in
  /// rows whose partials have no positive sum.
  virtual void forward(ConstMatrixRef logits, const RowScan& scan,
                       std::span<SoftmaxPartial> partials, MatrixView<float> out) = 0;
  /// Multiplies rows by factors [rows].
  virtual void multiply(MatrixView<float> values, std::span<const float> factors) = 0;
  /// d_logits <- gradient from d_out [rows, width] with out [rows, width] of all shards. May be the
  /// logits' memory.
  virtual void backward(ConstMatrixRef logits, const RowPass& pass,
                        std::span<const RowNormalizer> normalizers, MatrixView<const float> out,
                        MatrixView<const float> d_out, MatrixRef d_logits) = 0;
};

/// Creates the passes of the host.
std::unique_ptr<RowProjection> make_host_row_projection(const ProjectionShard& shard);

}  // namespace gyre
