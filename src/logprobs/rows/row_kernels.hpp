#pragma once
// Passes over the rows of a shard, on the host or on a device. row_statistics.hpp,
// row_gradient.hpp, token_ids.hpp, row_selection.hpp and row_digits.hpp define the passes and
// implement them for the host; cuda_row_kernels.hpp implements them for a device.
//
//     matrices of logits, gradients, log-probabilities     in the kernels' memory space
//     arrays with one or a few numbers per row             in host memory
//
// On return, a function has read its host arrays and completed its results in host memory; it
// accesses matrices in order of the kernels' stream. So a function with results in host memory
// waits for the device, and a function that writes a matrix does not. The passes of row_digits.hpp
// take many rows per call here, because one row does not fill a device.

#include <cstdint>
#include <memory>
#include <span>

#include "core/matrix_ref.hpp"
#include "logprobs/rows/row_arithmetic.hpp"
#include "logprobs/rows/row_digits.hpp"
#include "logprobs/rows/row_gradient.hpp"
#include "logprobs/rows/row_projection.hpp"
#include "logprobs/rows/row_selection.hpp"
#include "logprobs/rows/row_statistics.hpp"
#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// A row whose probabilities are summed by digits of keys (row_digits.hpp).
struct MassRow {
  int64_t row = 0;
  MassScan scan;
};

/// Columns [begin, end) of a row to compare with a value.
struct ColumnQuery {
  int64_t row = 0, begin = 0, end = 0;
  float value = 0;
};

/// The n-th last element of a row that equals a value; n >= 1, and there must be at least n.
struct TieQuery {
  int64_t row = 0;
  float value = 0;
  int64_t n = 1;
};

/// Partials of the rows of a shard: of whole rows (host), or of parts of them (device).
struct RowParts {
  const SoftmaxPartial* of_rows = nullptr;  ///< [rows]
  const rows::PartSums* sums = nullptr;     ///< [rows, count]
  int64_t count = 0;

  GYRE_HOST_DEVICE SoftmaxPartial partial(int64_t row, float scale, bool weighted) const {
    if (of_rows != nullptr) return of_rows[row];
    return rows::partials_of(sums + row * count, count, rows::base_2(scale), weighted);
  }
};

class RowKernels {
 public:
  virtual ~RowKernels() = default;
  /// Memory space of the matrices: host or device.
  virtual MemorySpace space() const = 0;
  /// The stream that orders all work on matrices.
  virtual Stream& stream() = 0;

  /// Partials of rows for later work of the stream, in `memory` of space(), which grows. The
  /// scan's factors of rows are in that space, too.
  virtual RowParts parts(ConstMatrixRef logits, const RowScan& scan, Buffer<std::byte>& memory) = 0;
  /// Returns cross partials [rows] for later work of the stream, in `memory` as for parts().
  virtual const CrossPartial* cross_parts(ConstMatrixRef student, ConstMatrixRef teacher,
                                          int64_t columns, int threads,
                                          Buffer<std::byte>& memory) = 0;

  // These are softmax_partials, softmax_cross_partials, row_sums, row_gradient and so on.
  virtual void partials(ConstMatrixRef logits, const RowScan& scan,
                        std::span<SoftmaxPartial> out) = 0;
  virtual void cross_partials(ConstMatrixRef student, ConstMatrixRef teacher, int64_t columns,
                              int threads, std::span<CrossPartial> out) = 0;
  virtual void sums(ConstMatrixRef values, int64_t columns, int threads, std::span<double> out) = 0;
  virtual void gradient(ConstMatrixRef logits, const RowPass& pass,
                        std::span<const RowNormalizer> normalizers,
                        std::span<const GradientCoefficients> coefficients,
                        const RowTokenIds& token_ids, MatrixRef d_logits) = 0;
  virtual void log_softmax(ConstMatrixRef logits, const RowPass& pass,
                           std::span<const RowNormalizer> normalizers, bool exponentiate,
                           MatrixRef out) = 0;
  virtual void log_softmax_gradient(ConstMatrixRef logits, ConstMatrixRef d_logprobs,
                                    const RowPass& pass, std::span<const RowNormalizer> normalizers,
                                    std::span<const float> sums, MatrixRef d_logits) = 0;
  virtual void cross_gradient(ConstMatrixRef student, ConstMatrixRef teacher, const RowPass& pass,
                              std::span<const RowNormalizer> students,
                              std::span<const RowNormalizer> teachers,
                              std::span<const float> gradients, MatrixRef d_student) = 0;
  virtual void filtered_gradient(ConstMatrixRef logits, const RowPass& pass,
                                 std::span<const RowNormalizer> normalizers,
                                 std::span<const RowSurvivors> survivors, std::span<const float> a,
                                 const RowTokenIds& token_ids, MatrixRef d_logits) = 0;
  virtual void scatter_token_weights(const RowTokenIds& token_ids, int64_t columns,
                                     MatrixRef d_logits, int threads) = 0;
  virtual void gather_token_logits(ConstMatrixRef logits, std::span<const int32_t> ids,
                                   int64_t per_row, int64_t first_column, int64_t columns,
                                   std::span<float> values) = 0;
  virtual void top(ConstMatrixRef logits, const RowScan& scan, const RowTop& top,
                   std::span<SoftmaxPartial> partials) = 0;

  // Passes over selected rows; `columns` is the number of valid columns, the first of each row.

  /// masses [rows.size(), digit_sums] <- the sums that add_masses() computes for each row.
  virtual void masses(ConstMatrixRef logits, int64_t columns, std::span<const MassRow> rows,
                      int threads, std::span<int64_t> masses) = 0;
  /// counts [queries.size()] <- numbers of columns above and equal to each query's value.
  virtual void count_columns(ConstMatrixRef logits, std::span<const ColumnQuery> queries,
                             int threads, std::span<ColumnCounts> counts) = 0;
  /// found [queries.size()] <- column of the element that each query describes.
  virtual void find_ties(ConstMatrixRef logits, int64_t columns, std::span<const TieQuery> queries,
                         int threads, std::span<int64_t> found) = 0;

  virtual std::unique_ptr<RowProjection> make_projection(const ProjectionShard& shard) = 0;
};

/// Kernels of the host. They are stateless, so any number of threads may use them.
RowKernels& cpu_row_kernels();

/// Creates kernels for the stream's memory space. The stream must outlive them.
std::unique_ptr<RowKernels> make_row_kernels(Stream& stream);

/// Returns `kernels`, or the host's kernels if it is null.
inline RowKernels& kernels_or_cpu(RowKernels* kernels) {
  return kernels == nullptr ? cpu_row_kernels() : *kernels;
}

}  // namespace gyre
