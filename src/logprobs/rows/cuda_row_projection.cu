#include <algorithm>
#include <tuple>

#include "core/error.hpp"
#include "logprobs/rows/cuda_row_lanes.cuh"
#include "logprobs/rows/cuda_row_launch.hpp"
#include "logprobs/rows/cuda_row_memory.hpp"
#include "logprobs/rows/cuda_row_projection.hpp"

namespace gyre {
namespace {

using rows::block_threads;

/// A thread for each column of each row of `out`.
template <class T>
__global__ void __launch_bounds__(block_threads)
    project(MatrixView<const T> logits, RowScale scale, const SoftmaxPartial* partials,
            rows::DeviceEntries by_column, MatrixView<float> out) {
  const rows::PartOfRow mine(rows::parts_of(out.cols, block_threads), out.cols, block_threads);
  const int64_t c = mine.begin + threadIdx.x;
  if (c >= mine.end) return;
  const SoftmaxPartial partial = partials[mine.row];
  double sum = 0;
  if (partial.sum > 0) {
    const rows::Distribution p({partial.max, std::log(partial.sum)}, scale[mine.row]);
    const T* const row = rows::row_of(logits, mine.row);
    for (int32_t e = by_column.offsets[c]; e < by_column.offsets[c + 1]; ++e) {
      const ProjectionShard::Entry entry = by_column.entries[e];
      sum += static_cast<double>(entry.weight) *
             static_cast<double>(p.probability(to_float(row[entry.at])));
    }
  }
  rows::row_of(out, mine.row)[c] = static_cast<float>(sum);
}

__global__ void __launch_bounds__(block_threads)
    multiply_rows(MatrixView<float> values, const float* factors) {
  const rows::PartOfRow mine(rows::parts_of(values.cols, block_threads), values.cols,
                             block_threads);
  const int64_t c = mine.begin + threadIdx.x;
  const float factor = factors[mine.row];
  if (c < mine.end && factor != 1) rows::row_of(values, mine.row)[c] *= factor;
}

/// A block for each row.
__global__ void __launch_bounds__(block_threads)
    sum_products(MatrixView<const float> out, MatrixView<const float> d_out,
                 rows::RowCentre* centres) {
  __shared__ double shared[rows::block_warps];
  const int64_t row = blockIdx.x;
  double mine = 0;
  bool some = false;
  for (int64_t c = threadIdx.x; c < out.cols; c += block_threads) {
    const float d = rows::row_of(d_out, row)[c];
    some |= d != 0;
    mine += static_cast<double>(d) * static_cast<double>(rows::row_of(out, row)[c]);
  }
  const bool needed = __syncthreads_or(some) != 0;
  const double sum = rows::block_sum(mine, shared);
  if (threadIdx.x == 0) centres[row] = {static_cast<float>(sum), needed};
}

Launch over_columns(CUstream_st* stream, int64_t rows, int64_t columns) {
  return {rows::blocks_of(rows * rows::parts_of(columns, block_threads)), block_threads, stream};
}

class CudaRowProjection final : public RowProjection {
 public:
  CudaRowProjection(Stream& stream, const ProjectionShard& shard)
      : stream_(stream), uploads_(stream), results_(stream), width_(shard.width) {
    keep(row_offsets_, shard.row_offsets);
    keep(column_offsets_, shard.column_offsets);
    keep(by_row_, shard.by_row);
    keep(by_column_, shard.by_column);
    stream.synchronize();  // the shard may go
  }

  void forward(ConstMatrixRef logits, const RowScan& scan, std::span<SoftmaxPartial> partials,
               MatrixView<float> out) override {
    check_projected(out, logits.rows);
    Places places;
    const int64_t results = places.add<SoftmaxPartial>(logits.rows);
    const int64_t parts =
        places.add<rows::PartSums>(logits.rows * rows::parts_of(scan.columns, rows::part_columns));
    std::byte* const scratch = scratch_.at_least(places.bytes());
    auto* const found = reinterpret_cast<SoftmaxPartial*>(scratch + results);
    const auto [scales] = uploads_.send(factors_of(scan.scale, logits.rows));
    RowScan there = scan;
    there.scale = scan.scale.at(scales);
    rows::launch_partials(handle(), logits, there,
                          reinterpret_cast<rows::PartSums*>(scratch + parts), found);
    const rows::DeviceEntries entries{column_offsets_.data(), by_column_.data()};
    if (logits.rows > 0)
      rows::with_elements(logits, [&](auto z) {
        launch(over_columns(handle(), out.rows, width_), project<typename decltype(z)::Type>,
               z.view, there.scale, found, entries, out);
      });
    std::copy_n(results_.fetch(found, logits.rows), partials.size(), partials.begin());
  }

  void multiply(MatrixView<float> values, std::span<const float> factors) override {
    if (factors.empty()) return;
    const auto [there] = uploads_.send(factors);
    launch(over_columns(handle(), values.rows, values.cols), multiply_rows, values, there);
  }

  void backward(ConstMatrixRef logits, const RowPass& pass,
                std::span<const RowNormalizer> normalizers, MatrixView<const float> out,
                MatrixView<const float> d_out, MatrixRef d_logits) override {
    check_projected(out, logits.rows);
    check_projected(d_out, logits.rows);
    GYRE_CHECK(logits.data != d_logits.data || logits.type == d_logits.type,
               "in place, but the type differs from the logits'");
    if (logits.rows == 0) return;
    Places places;
    places.add<rows::RowCentre>(logits.rows);
    auto* const centres = reinterpret_cast<rows::RowCentre*>(scratch_.at_least(places.bytes()));
    const auto [there, scales] = uploads_.send(normalizers, factors_of(pass.scale, logits.rows));
    RowPass with_scales = pass;
    with_scales.scale = pass.scale.at(scales);
    launch({rows::blocks_of(logits.rows), block_threads, handle()}, sum_products, out, d_out,
           centres);
    rows::launch_projection_gradient(handle(), logits, with_scales, there, centres,
                                     {row_offsets_.data(), by_row_.data()}, d_out, d_logits);
  }

 private:
  CUstream_st* handle() const { return cuda_handle(stream_); }
  /// Factors of rows to upload; none if all have the same.
  static std::span<const float> factors_of(const RowScale& scale, int64_t rows) {
    return {scale.of_rows(), scale.of_rows() == nullptr ? 0 : static_cast<size_t>(rows)};
  }
  template <class T>
  void keep(Buffer<T>& there, const std::vector<T>& here) {
    there = Buffer<T>(std::ssize(here), MemorySpace::device);
    stream_.copy(there.data(), here.data(), std::ssize(here) * static_cast<int64_t>(sizeof(T)));
  }
  template <class T>
  void check_projected(const MatrixView<T>& values, int64_t rows) const {
    GYRE_CHECK(values.rows == rows && values.cols == width_,
               "{} x {} projected probabilities of {} rows and {} columns", values.rows,
               values.cols, rows, width_);
  }

  Stream& stream_;
  Uploads uploads_;
  Pool scratch_{MemorySpace::device};
  Download results_;
  int64_t width_;
  Buffer<int32_t> row_offsets_, column_offsets_;
  Buffer<ProjectionShard::Entry> by_row_, by_column_;
};

}  // namespace

std::unique_ptr<RowProjection> make_cuda_row_projection(Stream& stream,
                                                        const ProjectionShard& shard) {
  return std::make_unique<CudaRowProjection>(stream, shard);
}

}  // namespace gyre
