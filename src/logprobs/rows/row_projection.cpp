#include "logprobs/rows/row_projection.hpp"

#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "logprobs/rows/row_passes.hpp"

namespace gyre {

ProjectionShard::ProjectionShard(const SparseMatrixRef& matrix, int64_t first, int64_t count)
    : width(matrix.width), column_offsets(matrix.width + 1, 0) {
  const int64_t begin = matrix.offsets[first], end = matrix.offsets[first + count];
  for (int64_t e = begin; e < end; ++e) {
    by_row.push_back({matrix.columns[e], matrix.weights[e]});
    ++column_offsets[matrix.columns[e] + 1];
  }
  for (int64_t c = 0; c < width; ++c) column_offsets[c + 1] += column_offsets[c];
  std::vector<int32_t> next(column_offsets.begin(), column_offsets.end() - 1);
  by_column.resize(by_row.size());
  for (int64_t v = 0; v < count; ++v) {
    for (int64_t e = matrix.offsets[first + v]; e < matrix.offsets[first + v + 1]; ++e)
      by_column[next[matrix.columns[e]]++] = {static_cast<int32_t>(v), matrix.weights[e]};
    row_offsets.push_back(static_cast<int32_t>(matrix.offsets[first + v + 1] - begin));
  }
}

namespace {

/// Work on the columns of a shard that have entries, packed: each row's logits of them are read
/// once, and their exponentials computed side by side.
class HostRowProjection final : public RowProjection {
 public:
  explicit HostRowProjection(const ProjectionShard& shard) : shard_(shard) {
    std::vector<int32_t> place(shard.columns(), 0);
    for (int64_t v = 0; v < shard.columns(); ++v) {
      if (shard.row_offsets[v] == shard.row_offsets[v + 1]) continue;
      place[v] = static_cast<int32_t>(used_.size());
      used_.push_back(static_cast<int32_t>(v));
    }
    for (ProjectionShard::Entry& entry : shard_.by_column) entry.at = place[entry.at];
  }

  void forward(ConstMatrixRef logits, const RowScan& scan, std::span<SoftmaxPartial> partials,
               MatrixView<float> out) override {
    check_rows(logits, scan.columns, partials.size());
    check_projected(out, logits.rows);
    for_each_part(scan.threads, logits.rows, cost(), [&](int64_t begin, int64_t end, int) {
      std::vector<float> p(used_.size());
      for (int64_t r = begin; r < end; ++r) {
        SoftmaxPartial& partial = partials[r];
        softmax_partials(logits.rows_from(r, 1), {scan.columns, scan.scale[r], false, 1},
                         {&partial, 1});
        float* const to = out.row(r);
        if (partial.sum > 0) {
          probabilities(logits, r, scan.scale[r], {partial.max, std::log(partial.sum)}, p);
          project(p, to);
        } else {
          std::fill_n(to, shard_.width, 0.0F);
        }
      }
    });
  }

  void multiply(MatrixView<float> values, std::span<const float> factors) override {
    for (int64_t r = 0; r < values.rows; ++r)
      for (int64_t c = 0; factors[r] != 1 && c < values.cols; ++c) values(r, c) *= factors[r];
  }

  void backward(ConstMatrixRef logits, const RowPass& pass,
                std::span<const RowNormalizer> normalizers, MatrixView<const float> out,
                MatrixView<const float> d_out, MatrixRef d_logits) override {
    check_projected(out, logits.rows);
    check_projected(d_out, logits.rows);
    for_each_part(pass.threads, logits.rows, cost(), [&](int64_t begin, int64_t end, int) {
      std::vector<float> p(used_.size());
      for (int64_t r = begin; r < end; ++r)
        backward_row(logits, r, pass, normalizers[r], out.row(r), d_out.row(r), p, d_logits);
    });
  }

 private:
  /// Nanoseconds of a row.
  double cost() const {
    return 10 + 0.2 * static_cast<double>(shard_.columns()) +
           2.0 * static_cast<double>(shard_.by_row.size() + shard_.width);
  }
  template <class T>
  void check_projected(const MatrixView<T>& values, int64_t rows) const {
    GYRE_CHECK(values.rows == rows && values.cols == shard_.width,
               "{} x {} projected probabilities of {} rows and {} columns", values.rows,
               values.cols, rows, shard_.width);
  }
  /// p [used] <- probabilities of the columns with entries in row r.
  void probabilities(const ConstMatrixRef& logits, int64_t r, float scale,
                     const RowNormalizer& normalizer, std::vector<float>& p) const {
    const auto count = std::ssize(used_);
    if (count == 0) return;
    if (logits.type == DType::f32) {
      const float* const row = logits.as<float>().row(r);
      for (int64_t i = 0; i < count; ++i) p[i] = row[used_[i]];
    } else {
      const bf16* const row = logits.as<bf16>().row(r);
      for (int64_t i = 0; i < count; ++i) p[i] = to_float(row[used_[i]]);
    }
    const MatrixView<float> row(p.data(), 1, count);
    row_log_softmax(ConstMatrixRef(MatrixRef(row)), {count, scale, 1}, {&normalizer, 1}, true, row);
  }
  void project(const std::vector<float>& p, float* to) const {
    for (int64_t c = 0; c < shard_.width; ++c) {
      double sum = 0;
      for (int32_t e = shard_.column_offsets[c]; e < shard_.column_offsets[c + 1]; ++e)
        sum += static_cast<double>(shard_.by_column[e].weight) *
               static_cast<double>(p[shard_.by_column[e].at]);
      to[c] = static_cast<float>(sum);
    }
  }
  void backward_row(const ConstMatrixRef& logits, int64_t r, const RowPass& pass,
                    const RowNormalizer& normalizer, const float* out, const float* d_out,
                    std::vector<float>& p, const MatrixRef& d_logits) const {
    double centre = 0;
    bool some = false;
    for (int64_t c = 0; c < shard_.width; ++c) {
      centre += static_cast<double>(d_out[c]) * static_cast<double>(out[c]);
      some = some || d_out[c] != 0;
    }
    const bool usable = std::isfinite(normalizer.max) && std::isfinite(normalizer.log_sum);
    const float scale = pass.scale[r];
    if (some && usable) probabilities(logits, r, scale, normalizer, p);  // before it is overwritten
    // A coefficient other than 0 makes a row that is no distribution NaN.
    const double slope = !some ? 0 : usable ? -scale * centre : 1;
    const GradientCoefficients coefficients{static_cast<float>(slope), 0};
    row_gradient(logits.rows_from(r, 1), {pass.columns, scale, 1}, {&normalizer, 1},
                 {&coefficients, 1}, {}, d_logits.rows_from(r, 1));
    if (!some || !usable) return;
    if (d_logits.type == DType::f32)
      put(d_out, p, scale, centre, d_logits.as<float>().row(r), [](float x) { return x; });
    else
      put(d_out, p, scale, centre, d_logits.as<bf16>().row(r), [](float x) { return to_bf16(x); });
  }
  /// Writes the gradients of the columns with entries.
  template <class T, class Round>
  void put(const float* d_out, const std::vector<float>& p, double scale, double centre, T* to,
           Round round) const {
    for (size_t i = 0; i < used_.size(); ++i) {
      const int32_t v = used_[i];
      double g = 0;
      for (int32_t e = shard_.row_offsets[v]; e < shard_.row_offsets[v + 1]; ++e)
        g += static_cast<double>(shard_.by_row[e].weight) *
             static_cast<double>(d_out[shard_.by_row[e].at]);
      to[v] = round(static_cast<float>(scale * static_cast<double>(p[i]) * (g - centre)));
    }
  }

  ProjectionShard shard_;  // its by_column has places in `used_`
  std::vector<int32_t> used_;
};

}  // namespace

std::unique_ptr<RowProjection> make_host_row_projection(const ProjectionShard& shard) {
  return std::make_unique<HostRowProjection>(shard);
}

}  // namespace gyre
