// The decoder's operations on rows, on a device, against their definitions in double precision.

#include <cmath>
#include <limits>
#include <vector>

#include "close.hpp"
#include "gpu_test.hpp"
#include "model/cuda_decoder_ops.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::rounding;

/// A matrix on the device, with NaN behind each row and behind the last; and what it held at first.
struct Matrix {
  int64_t rows = 0, cols = 0, stride = 0;
  std::vector<float> values;  // [rows, stride] and a guard
  Buffer<float> memory;
  MatrixView<float> view() { return {memory.data(), rows, cols, stride}; }
  double at(int64_t r, int64_t c) const {
    return static_cast<double>(values[static_cast<size_t>(r * stride + c)]);
  }
};

class CudaDecoderOps : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) ops_ = make_cuda_decoder_ops(stream());
  }
  DecoderOps& ops() { return *ops_; }

  Matrix empty(int64_t rows, int64_t cols, int64_t gap = 3) {
    Matrix x{rows, cols, cols + gap, {}, {}};
    x.values.assign(static_cast<size_t>(rows * x.stride + 7),
                    std::numeric_limits<float>::quiet_NaN());
    x.memory = to_device<float>(x.values);
    return x;
  }
  Matrix random(int64_t rows, int64_t cols, unsigned seed, float size = 1) {
    Matrix x = empty(rows, cols);
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c)
        x.values[static_cast<size_t>(r * x.stride + c)] = size * normal(generator);
    x.memory = to_device<float>(x.values);
    return x;
  }

  using Expected = std::function<double(int64_t row, int64_t col)>;
  /// Every element within `tolerance`, and nothing written outside.
  void expect(const Matrix& x, const Expected& want, const Expected& tolerance) {
    const std::vector<float> got = to_host(x.memory);
    for (size_t i = 0; i < got.size(); ++i) {
      const int64_t r = static_cast<int64_t>(i) / x.stride, c = static_cast<int64_t>(i) % x.stride;
      if (r < x.rows && c < x.cols)
        EXPECT_NEAR(static_cast<double>(got[i]), want(r, c), tolerance(r, c))
            << "row " << r << " column " << c;
      else
        EXPECT_TRUE(std::isnan(got[i])) << "wrote outside: row " << r << " column " << c;
    }
  }

 private:
  std::unique_ptr<DecoderOps> ops_;
};

constexpr int64_t all_columns[] = {2, 33, 256, 300};

TEST_F(CudaDecoderOps, EmbeddingsAreThoseOfThisRanksTokens) {
  for (const int64_t cols : all_columns) {
    const Matrix table = random(10, cols, 1);
    Matrix out = empty(6, cols, 5);
    const std::vector<int32_t> tokens = {20, 29, 19, 30, 25, 0};
    const std::vector<int32_t> positions(6, 0);
    ops().set_slots(tokens, positions);
    ops().embed(MatrixView<const float>(table.memory.data(), 10, cols, table.stride), 20,
                out.view());
    expect(
        out,
        [&](int64_t r, int64_t c) {
          const int32_t token = tokens[static_cast<size_t>(r)];
          return token >= 20 && token < 30 ? table.at(token - 20, c) : 0.0;
        },
        [](int64_t, int64_t) { return 0.0; });
  }
}

TEST_F(CudaDecoderOps, ResidualsAreAddedAndNormalised) {
  constexpr float eps = 1e-5F;
  for (const int64_t cols : all_columns)
    for (const bool with_y : {false, true}) {
      Matrix x = random(4, cols, 1, 3), h = empty(4, cols, 1);
      const Matrix y = random(4, cols, 2), w = random(1, cols, 3);
      const auto sum = [&](int64_t r, int64_t c) { return x.at(r, c) + (with_y ? y.at(r, c) : 0); };
      const MatrixView<const float> y_view(with_y ? y.memory.data() : nullptr, 4, cols, y.stride);
      ops().add_rms_norm(x.view(), y_view, w.memory.data(), eps, h.view());
      expect(x, sum, [&](int64_t r, int64_t c) {
        return with_y ? rounding(1) * (std::abs(x.at(r, c)) + std::abs(y.at(r, c))) : 0;
      });
      const auto want = [&](int64_t r, int64_t c) {
        double squares = 0;
        for (int64_t i = 0; i < cols; ++i) squares += sum(r, i) * sum(r, i);
        return sum(r, c) / std::sqrt(squares / static_cast<double>(cols) + eps) * w.at(0, c);
      };
      expect(h, want, [&](int64_t r, int64_t c) {
        // A sum that cancels is wrong by roundings of what it was made of.
        const double cancelled =
            (std::abs(x.at(r, c)) + std::abs(y.at(r, c))) / std::abs(sum(r, c));
        return rounding(static_cast<double>(cols)) * std::abs(want(r, c)) * (1 + cancelled);
      });
    }
}

TEST_F(CudaDecoderOps, ARowOfZerosStaysOne) {
  Matrix x = random(1, 40, 1, 0), h = empty(1, 40);
  const Matrix w = random(1, 40, 3);
  ops().add_rms_norm(x.view(), {}, w.memory.data(), 1e-5F, h.view());
  expect(
      h, [](int64_t, int64_t) { return 0.0; }, [](int64_t, int64_t) { return 0.0; });
}

TEST_F(CudaDecoderOps, Additions) {
  for (const int64_t cols : all_columns) {
    Matrix x = random(3, cols, 1);
    const Matrix y = random(3, cols, 2);
    ops().add(x.view(), MatrixView<const float>(y.memory.data(), 3, cols, y.stride));
    expect(
        x, [&](int64_t r, int64_t c) { return x.at(r, c) + y.at(r, c); },
        [&](int64_t r, int64_t c) {
          return rounding(1) * (std::abs(x.at(r, c)) + std::abs(y.at(r, c)));
        });
  }
}

TEST_F(CudaDecoderOps, SiluOfTheGateTimesUp) {
  for (const int64_t cols : all_columns) {
    Matrix gate = random(3, cols, 1, 10);
    const Matrix up = random(3, cols, 2);
    const auto want = [&](int64_t r, int64_t c) {
      const double g = gate.at(r, c);
      return g / (1 + std::exp(-g)) * up.at(r, c);
    };
    ops().silu_multiply(gate.view(), MatrixView<const float>(up.memory.data(), 3, cols, up.stride));
    expect(gate, want, [&](int64_t r, int64_t c) {
      // 1 + |g| bounds the condition number of silu; below 1e-37 f32 has fewer digits.
      return rounding(1) * std::abs(want(r, c)) * (1 + std::abs(gate.at(r, c))) + 1e-37;
    });
  }
}

TEST_F(CudaDecoderOps, QueriesAndKeysRotateByTheirPositions) {
  const std::vector<int32_t> positions = {0, 1, 255, 131071, 131072, 7};
  const std::vector<int32_t> tokens(positions.size(), 0);
  const int64_t rows = std::ssize(positions);
  ops().set_slots(tokens, positions);
  // Head dimensions change between calls, and come back.
  for (const int64_t head_dim : {2, 8, 80, 8})
    for (const double theta : {1e4, 5e5}) {
      Matrix q = random(rows, 3 * head_dim, 1), k = random(rows, 2 * head_dim, 2);
      ops().rope(q.view(), k.view(), head_dim, theta);
      const int64_t half = head_dim / 2;
      for (const Matrix* x : {&q, &k}) {
        const auto partner = [&](int64_t c) { return c % head_dim < half ? c + half : c - half; };
        expect(
            *x,
            [&](int64_t r, int64_t c) {
              const double angle = positions[static_cast<size_t>(r)] *
                                   std::pow(theta, -2.0 * static_cast<double>(c % half) /
                                                       static_cast<double>(head_dim));
              const double sign = c % head_dim < half ? -1 : 1;
              return x->at(r, c) * std::cos(angle) + sign * x->at(r, partner(c)) * std::sin(angle);
            },
            [&](int64_t r, int64_t c) {
              return rounding(1) * (std::abs(x->at(r, c)) + std::abs(x->at(r, partner(c))));
            });
      }
    }
}

TEST_F(CudaDecoderOps, NoRowsAreNothingToDo) {
  Matrix none = empty(0, 8);
  const Matrix w = random(1, 8, 1);
  ops().set_slots({}, {});
  ops().embed(MatrixView<const float>(w.memory.data(), 1, 8, 8), 0, none.view());
  ops().add_rms_norm(none.view(), {}, w.memory.data(), 1e-5F, none.view());
  ops().add(none.view(), none.view());
  ops().rope(none.view(), none.view(), 8, 1e4);
  ops().silu_multiply(none.view(), none.view());
  stream().synchronize();
}

}  // namespace GYRE_FILE
}  // namespace gyre
