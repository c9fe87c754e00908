// The executor's array operations on the device against those on the host.

#include <random>

#include "attention/array_ops.hpp"
#include "core/tolerance.hpp"
#include "gpu_test.hpp"
#include "runtime/host_copy.hpp"

namespace gyre {
namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

class ArrayOperations : public test::GpuTest {
 protected:
  Stream& host() { return host_; }
  Stream& device() { return stream(); }
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  template <class T>
  std::vector<T> normal(int64_t count) {
    std::normal_distribution<float> distribution;
    std::vector<T> values(count);
    for (T& x : values) {
      if constexpr (std::is_same_v<T, float>)
        x = distribution(random_);
      else
        x = to_bf16(distribution(random_));
    }
    return values;
  }

 private:
  HostStream host_;
  std::mt19937 random_{7};
};

/// Rows of two planes, of which one is used; NaN in the other one and behind the rows.
struct TwoPlanes {
  static constexpr int64_t guard = 4;
  int64_t rows, cols;
  std::vector<float> values;
  TwoPlanes(int64_t rows_, int64_t cols_, const std::vector<float>& plane)
      : rows(rows_), cols(cols_), values(static_cast<size_t>((rows_ + guard) * 2 * cols_), NAN) {
    for (int64_t r = 0; r < rows; ++r)
      std::copy_n(plane.begin() + r * cols, cols, values.begin() + r * 2 * cols);
  }
  template <class T>
  MatrixView<T> view(T* data) const {
    return {data, rows, cols, 2 * cols};
  }
  /// Whether another one has NaN where this one has, and nowhere else.
  void expect_guarded(const std::vector<float>& other) const {
    for (size_t i = 0; i < values.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      const bool used = at / (2 * cols) < rows && at % (2 * cols) < cols;
      EXPECT_EQ(std::isnan(other[i]), !used) << "element " << i;
    }
  }
};

TEST_F(ArrayOperations, FillsOnePlane) {
  const TwoPlanes stats(37, 5, normal<float>(37 * 5));
  Buffer<float> there = to_device<float>(stats.values);
  fill(stats.view(there.data()), minus_infinity, device());
  const std::vector<float> got = to_host(there);
  stats.expect_guarded(got);
  for (size_t i = 0; i < got.size(); ++i)
    if (!std::isnan(got[i])) {
      EXPECT_EQ(got[i], minus_infinity) << i;
    }
}

TEST_F(ArrayOperations, SumOverHeadsGoesToTheFirst) {
  for (const auto& [rows, heads, dim, part] :
       {std::array<int64_t, 4>{37, 5, 8, 3}, {300, 2, 24, 24}, {1, 130, 3, 1}, {4, 1, 5, 2}}) {
    std::vector<float> values = normal<float>(rows * heads * dim);
    const std::vector<float> before = values;
    Buffer<float> there = to_device<float>(values);
    sum_over_heads({values.data(), rows, heads * dim, heads * dim}, dim, part, host());
    sum_over_heads(there.matrix(rows, heads * dim), dim, part, device());
    EXPECT_EQ(to_host(there), values);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < dim; ++i) {
        double sum = 0;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = (r * heads + h) * dim + i;
          sum += before[at];
          const float kept = i < dim - part ? before[at] : 0;
          const bool is_sum = i >= dim - part && h == 0;
          EXPECT_TRUE(is_sum || values[at] == kept) << r << ", " << h << ", " << i;
        }
        if (i < dim - part) continue;
        EXPECT_FLOAT_EQ(values[r * heads * dim + i], static_cast<float>(sum)) << r << ", " << i;
      }
  }
}

/// Shapes of statistics: fewer and more rows than warps, heads that no warp divides.
const std::vector<std::array<int64_t, 3>> shapes = {
    {1, 1, 1}, {5, 3, 8}, {70, 4, 20}, {9, 2, 128}, {3, 7, 33}};

template <class T>
class TypedOperations : public ArrayOperations {};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(TypedOperations, Types);

TYPED_TEST(TypedOperations, TakeInSinks) {
  using T = TypeParam;
  for (const auto& [rows, heads, dim] : shapes) {
    std::vector<float> lse = this->template normal<float>(rows * heads);
    lse[this->below(rows * heads)] = minus_infinity;
    const std::vector<float> sinks = this->template normal<float>(heads);
    TwoPlanes here(rows, heads, lse);
    std::vector<T> out = this->template normal<T>(rows * heads * dim);
    Buffer<float> stats = this->template to_device<float>(here.values);
    Buffer<T> out_there = this->template to_device<T>(out);
    const Buffer<float> sinks_there = this->template to_device<float>(sinks);
    take_in_sinks(out_there.matrix(rows, heads * dim), here.view(stats.data()), sinks_there.data(),
                  this->device());
    take_in_sinks(MatrixView<T>(out.data(), rows, heads * dim), here.view(here.values.data()),
                  sinks.data(), this->host());
    const std::vector<float> got_stats = this->to_host(stats);
    here.expect_guarded(got_stats);
    const std::vector<T> got = this->to_host(out_there);
    // exp, log1p, a sum and a product: each side rounds them.
    const double tolerance = tolerance_for(DType::f32, 4);
    for (size_t i = 0; i < here.values.size(); ++i) {
      const float want = here.values[i];
      if (want == minus_infinity) {
        EXPECT_EQ(got_stats[i], want);
      } else if (!std::isnan(want)) {
        EXPECT_NEAR(got_stats[i], want,
                    tolerance * std::max(1.0, std::abs(static_cast<double>(want))));
      }
    }
    for (size_t i = 0; i < out.size(); ++i) {
      const double want = static_cast<double>(to_float(out[i]));
      EXPECT_NEAR(static_cast<double>(to_float(got[i])), want,
                  std::abs(want) * (tolerance + epsilon_of(dtype_of<T>)));
    }
  }
}

TYPED_TEST(TypedOperations, MergesOfPartialResults) {
  using T = TypeParam;
  for (const auto& [rows, heads, dim] : shapes) {
    std::vector<float> lse = this->template normal<float>(rows * heads), part_lse = lse;
    std::ranges::reverse(part_lse);
    part_lse[this->below(rows * heads)] = minus_infinity;
    std::vector<T> out = this->template normal<T>(rows * heads * dim), part = out;
    std::ranges::reverse(part);
    Buffer<float> lse_there = this->template to_device<float>(lse),
                  part_lse_there = this->template to_device<float>(part_lse);
    Buffer<T> out_there = this->template to_device<T>(out),
              part_there = this->template to_device<T>(part);
    const auto merge = [&](T* sum, float* stats, T* term, float* term_stats, Stream& stream) {
      const MatrixView<float> all(stats, rows, heads, heads), more(term_stats, rows, heads, heads);
      merge_statistics(all, more, stream);
      const Partial to{MatrixView<T>(sum, rows, heads * dim), all};
      rescale_output(to, more, stream);
      add_output(to, {MatrixView<T>(term, rows, heads * dim), more}, stream);
    };
    merge(out_there.data(), lse_there.data(), part_there.data(), part_lse_there.data(),
          this->device());
    merge(out.data(), lse.data(), part.data(), part_lse.data(), this->host());
    // exp, log1p, sums and products: each side rounds them, and may join a product and a sum.
    const double tolerance = tolerance_for(DType::f32, 6) + 2 * epsilon_of(dtype_of<T>);
    const auto expect_near = [&](const auto& got, const auto& want) {
      for (size_t i = 0; i < want.size(); ++i) {
        const auto x = static_cast<double>(to_float(want[i]));
        EXPECT_NEAR(static_cast<double>(to_float(got[i])), x, tolerance * (1 + std::abs(x))) << i;
      }
    };
    expect_near(this->to_host(lse_there), lse);
    expect_near(this->to_host(out_there), out);
  }
}

TYPED_TEST(TypedOperations, Deltas) {
  using T = TypeParam;
  for (const auto& [rows, heads, dim] : shapes) {
    const std::vector<float> out = this->template normal<float>(rows * heads * dim);
    const std::vector<T> d_out = this->template normal<T>(rows * heads * dim);
    TwoPlanes here(rows, heads, std::vector<float>(rows * heads, 0));
    Buffer<float> stats = this->template to_device<float>(here.values);
    const Buffer<float> out_there = this->template to_device<float>(out);
    const Buffer<T> d_out_there = this->template to_device<T>(d_out);
    row_deltas(out_there.matrix(rows, heads * dim), d_out_there.matrix(rows, heads * dim),
               here.view(stats.data()), this->device());
    row_deltas(MatrixView<const float>(out.data(), rows, heads * dim),
               MatrixView<const T>(d_out.data(), rows, heads * dim), here.view(here.values.data()),
               this->host());
    const std::vector<float> got = this->to_host(stats);
    here.expect_guarded(got);
    for (int64_t i = 0; i < rows * heads; ++i) {
      double size = 0;  // of the terms, whose sum is in another order
      for (int64_t d = 0; d < dim; ++d) {
        const auto at = static_cast<size_t>(i * dim + d);
        size += std::abs(static_cast<double>(out[at] * to_float(d_out[at])));
      }
      const auto at = static_cast<size_t>(i / heads * 2 * heads + i % heads);
      const auto want = static_cast<double>(here.values[at]);
      EXPECT_NEAR(static_cast<double>(got[at]), want,
                  std::abs(want) * epsilon_of(DType::f32) +
                      size * static_cast<double>(dim) * epsilon_of(DType::f64));
    }
  }
}

TEST_F(ArrayOperations, GradientsOfSinksAddUpInOneOrder) {
  // Fewer rows than a block takes at once and more than all blocks do; one block of heads and two.
  for (const auto& [rows, heads] :
       {std::array<int64_t, 2>{0, 3}, {1, 3}, {31, 1}, {700, 3}, {2100, 33}, {9, 5}}) {
    std::vector<float> lse_values = normal<float>(rows * heads);
    if (rows > 0) lse_values[below(rows * heads)] = minus_infinity;
    const std::vector<float> deltas = normal<float>(rows * heads), sinks = normal<float>(heads);
    const TwoPlanes lse(rows, heads, lse_values), delta(rows, heads, deltas);
    std::vector<double> want(heads, 2.5);
    const Buffer<double> before = to_device<double>(want);
    SinkGradients().add(lse.view(lse.values.data()), delta.view(delta.values.data()), sinks.data(),
                        want.data(), host());
    const Buffer<float> lse_there = to_device<float>(lse.values),
                        delta_there = to_device<float>(delta.values),
                        sinks_there = to_device<float>(sinks);
    std::vector<std::vector<double>> results;
    Buffer<float> other(1, MemorySpace::device);
    SinkGradients gradients;
    for (int run = 0; run < 2; ++run) {
      // A third launch, as every second one of the software GPU has its threads in reverse.
      fill(other.matrix(1, 1), 0, device());
      Buffer<double> sums(heads, MemorySpace::device);
      stream().copy(sums.data(), before.data(), want.size() * sizeof(double));
      gradients.add(lse.view(lse_there.data()), delta.view(delta_there.data()), sinks_there.data(),
                    sums.data(), device());
      results.push_back(to_host(sums));
    }
    EXPECT_EQ(results[0], results[1]);
    for (size_t h = 0; h < want.size(); ++h) {
      double size = 2.5;
      for (size_t i = h; i < deltas.size(); i += want.size())
        size += std::abs(sink_gradient_term(sinks[h], lse_values[i], deltas[i]));
      EXPECT_NEAR(results[0][h], want[h],
                  size * static_cast<double>(rows + 1) * epsilon_of(DType::f64));
    }
  }
}

TEST_F(ArrayOperations, HostFillAndHostCopyAreTheWayThereAndBack) {
  const std::vector<bf16> values = normal<bf16>(7 * 12);
  Buffer<bf16> there(7 * 12, MemorySpace::device);
  const MatrixRef all(there.matrix(7, 12));
  HostFill fill(all, stream());
  for (int64_t r = 0; r < 7; ++r)
    for (int64_t c = 0; c < 12; ++c) fill.matrix().as<bf16>()(r, c) = values[r * 12 + c];
  fill.upload();
  EXPECT_EQ(to_host(there), values);
  const HostCopy part(all.columns_from(8, 4), stream());
  for (int64_t r = 0; r < 7; ++r)
    for (int64_t c = 0; c < 4; ++c) EXPECT_EQ(part.at(r, c), to_float(values[r * 12 + 8 + c]));
  EXPECT_THROW(HostFill(all.columns_from(0, 4), stream()), Error);
}

}  // namespace
}  // namespace gyre
