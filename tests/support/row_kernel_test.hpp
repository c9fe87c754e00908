#pragma once
// What suites of row kernels share: kernels of the backend, and rows of logits.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "backend_test.hpp"
#include "device_matrix.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "logprobs/tolerance.hpp"

namespace gyre::test::row_kernels {

inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
inline constexpr double none = -HUGE_VAL;
inline constexpr double lowest = static_cast<double>(std::numeric_limits<float>::lowest());
inline constexpr std::array both_types = {DType::f32, DType::bf16};

class RowKernelTest : public BackendTest {
 protected:
  void SetUp() override {
    BackendTest::SetUp();
    if (!IsSkipped()) kernels_ = make_row_kernels(stream());
  }
  RowKernels& kernels() { return *kernels_; }

 private:
  std::unique_ptr<RowKernels> kernels_;
};

/// With three columns of NaN behind the valid ones.
inline Matrix padded(const LogitRows& rows, DType type) {
  Matrix matrix(rows.tokens, rows.vocab_size + 3, type);
  for (int64_t t = 0; t < rows.tokens; ++t)
    for (int64_t v = 0; v < rows.vocab_size; ++v) matrix.set(t, v, rows.row(t)[v]);
  return matrix;
}
inline LogitRows one_row(const std::vector<double>& row) {
  LogitRows rows(1, std::ssize(row));
  rows.values = row;
  return rows;
}
/// What `type` holds of a number.
inline double stored(double z, DType type) {
  const auto x = static_cast<float>(z);
  return static_cast<double>(type == DType::bf16 ? to_float(to_bf16(x)) : x);
}
inline std::vector<double> random_row(int64_t columns, DType type, double size = 2,
                                      double offset = 0, uint64_t seed = 1) {
  std::vector<double> row = random_logits(1, columns, type, size, seed).values;
  for (double& z : row) z = stored(z + offset, type);
  return row;
}

/// Error over tolerance; infinite if one of them alone is NaN.
inline double share_of(double got, double want, double tolerance) {
  if (got == want || (std::isnan(got) && std::isnan(want))) return 0;
  const double share = std::abs(got - want) / tolerance;
  return std::isnan(share) ? HUGE_VAL : share;
}

/// The scores that the partials of shards give, merged in double.
struct Merged {
  double max = none, sum = 0, weighted = 0, scale = 1;

  Merged(const std::vector<SoftmaxPartial>& shards, double scale_ = 1) : scale(scale_) {
    for (const SoftmaxPartial& m : shards) max = std::max(max, static_cast<double>(m.max));
    for (const SoftmaxPartial& m : shards) {
      if (m.max == -infinity) continue;
      const double d = (static_cast<double>(m.max) - max) * scale;
      sum += static_cast<double>(m.sum) * std::exp(d);
      weighted += (static_cast<double>(m.weighted) + d * static_cast<double>(m.sum)) * std::exp(d);
    }
  }
  double logprob(double z) const { return (z - max) * scale - std::log(sum); }
  double entropy() const { return std::log(sum) - weighted / sum; }
};

/// Errors over tolerances of the entropy and of every log-probability: the largest.
inline double worst_share(const std::vector<double>& row, const Merged& got) {
  const std::vector<double> want = log_softmax_reference(row, 1 / got.scale);
  double worst = share_of(got.entropy(), score_row_reference(row, -1, 1 / got.scale).entropy,
                          logprob_tolerance() * entropy_scale(std::ssize(row)));
  for (size_t v = 0; v < row.size(); ++v)
    worst = std::max(worst, share_of(got.logprob(row[v]), want[v],
                                     logprob_tolerance() * logprob_scale(want[v])));
  return worst;
}

}  // namespace gyre::test::row_kernels
