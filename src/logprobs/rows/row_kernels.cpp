#include "logprobs/rows/row_kernels.hpp"

#include <algorithm>
#include <utility>

#include "core/error.hpp"
#include "logprobs/records/staged_arrays.hpp"
#include "logprobs/rows/cuda_row_kernels.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

/// Calls body(i) for `count` rows, each with a pass over its columns of `nanoseconds` per column.
template <class Body>
void for_each_query(int threads, size_t count, int64_t columns, double nanoseconds, Body body) {
  const auto cost = (1 + columns) * nanoseconds;
  for_each_part(threads, count, cost, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

class CpuRowKernels final : public RowKernels {
 public:
  MemorySpace space() const override { return MemorySpace::host; }
  Stream& stream() override { return stream_; }

  RowParts parts(ConstMatrixRef logits, const RowScan& scan, Buffer<std::byte>& memory) override {
    const auto out = at_least<SoftmaxPartial>(memory, logits.rows, MemorySpace::host);
    softmax_partials(logits, scan, out);
    return {.of_rows = out.data()};
  }
  const CrossPartial* cross_parts(ConstMatrixRef student, ConstMatrixRef teacher, int64_t columns,
                                  int threads, Buffer<std::byte>& memory) override {
    const auto out = at_least<CrossPartial>(memory, student.rows, MemorySpace::host);
    softmax_cross_partials(student, teacher, columns, threads, out);
    return out.data();
  }

  void partials(ConstMatrixRef logits, const RowScan& scan,
                std::span<SoftmaxPartial> out) override {
    softmax_partials(logits, scan, out);
  }
  void cross_partials(ConstMatrixRef student, ConstMatrixRef teacher, int64_t columns, int threads,
                      std::span<CrossPartial> out) override {
    softmax_cross_partials(student, teacher, columns, threads, out);
  }
  void sums(ConstMatrixRef values, int64_t columns, int threads, std::span<double> out) override {
    row_sums(values, columns, threads, out);
  }
  void gradient(ConstMatrixRef logits, const RowPass& pass,
                std::span<const RowNormalizer> normalizers,
                std::span<const GradientCoefficients> coefficients, const RowTokenIds& token_ids,
                MatrixRef d_logits) override {
    row_gradient(logits, pass, normalizers, coefficients, token_ids, d_logits);
  }
  void log_softmax(ConstMatrixRef logits, const RowPass& pass,
                   std::span<const RowNormalizer> normalizers, bool exponentiate,
                   MatrixRef out) override {
    row_log_softmax(logits, pass, normalizers, exponentiate, out);
  }
  void log_softmax_gradient(ConstMatrixRef logits, ConstMatrixRef d_logprobs, const RowPass& pass,
                            std::span<const RowNormalizer> normalizers, std::span<const float> sums,
                            MatrixRef d_logits) override {
    row_log_softmax_gradient(logits, d_logprobs, pass, normalizers, sums, d_logits);
  }
  void cross_gradient(ConstMatrixRef student, ConstMatrixRef teacher, const RowPass& pass,
                      std::span<const RowNormalizer> students,
                      std::span<const RowNormalizer> teachers, std::span<const float> gradients,
                      MatrixRef d_student) override {
    row_cross_gradient(student, teacher, pass, students, teachers, gradients, d_student);
  }
  void filtered_gradient(ConstMatrixRef logits, const RowPass& pass,
                         std::span<const RowNormalizer> normalizers,
                         std::span<const RowSurvivors> survivors, std::span<const float> a,
                         const RowTokenIds& token_ids, MatrixRef d_logits) override {
    row_filtered_gradient(logits, pass, normalizers, survivors, a, token_ids, d_logits);
  }
  void scatter_token_weights(const RowTokenIds& token_ids, int64_t columns, MatrixRef d_logits,
                             int threads) override {
    gyre::scatter_token_weights(token_ids, columns, d_logits, threads);
  }
  void gather_token_logits(ConstMatrixRef logits, std::span<const int32_t> ids, int64_t per_row,
                           int64_t first_column, int64_t columns,
                           std::span<float> values) override {
    gyre::gather_token_logits(logits, ids, per_row, first_column, columns, values);
  }
  void top(ConstMatrixRef logits, const RowScan& scan, const RowTop& top,
           std::span<SoftmaxPartial> partials) override {
    row_top(logits, scan, top, partials);
  }

  void masses(ConstMatrixRef logits, int64_t columns, std::span<const MassRow> rows, int threads,
              std::span<int64_t> masses) override {
    GYRE_CHECK(std::cmp_equal(masses.size(), std::ssize(rows) * digit_sums), "{} sums for {} rows",
               masses.size(), rows.size());
    std::fill(masses.begin(), masses.end(), 0);
    for_each_query(threads, rows.size(), columns, 1, [&](size_t i) {
      add_masses(logits, rows[i].row, columns, rows[i].scan, masses.data() + i * digit_sums);
    });
  }
  void count_columns(ConstMatrixRef logits, std::span<const ColumnQuery> queries, int threads,
                     std::span<ColumnCounts> counts) override {
    GYRE_CHECK(counts.size() == queries.size(), "{} counts of {} queries", counts.size(),
               queries.size());
    for_each_query(threads, queries.size(), logits.cols, 0.2, [&](size_t i) {
      const ColumnQuery& q = queries[i];
      counts[i] = gyre::count_columns(logits, q.row, q.begin, q.end, q.value);
    });
  }
  void find_ties(ConstMatrixRef logits, int64_t columns, std::span<const TieQuery> queries,
                 int threads, std::span<int64_t> found) override {
    GYRE_CHECK(found.size() == queries.size(), "{} columns for {} queries", found.size(),
               queries.size());
    for_each_query(threads, queries.size(), columns, 0.2, [&](size_t i) {
      const TieQuery& q = queries[i];
      found[i] = nth_last_equal(logits, q.row, columns, q.value, q.n);
    });
  }
  std::unique_ptr<RowProjection> make_projection(const ProjectionShard& shard) override {
    return make_host_row_projection(shard);
  }

 private:
  HostStream stream_;
};

}  // namespace

RowKernels& cpu_row_kernels() {
  static CpuRowKernels kernels;
  return kernels;
}

std::unique_ptr<RowKernels> make_row_kernels(Stream& stream) {
  if (stream.space() == MemorySpace::device) return make_cuda_row_kernels(stream);
  return std::make_unique<CpuRowKernels>();
}

}  // namespace gyre
