#pragma once
// The decoder's operations on rows, on every backend, against their definitions
// in double precision.

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <random>

#include "backend_test.hpp"
#include "close.hpp"
#include "model/decoder_ops.hpp"

namespace gyre::test::decoder_ops {

/// A matrix in the stream's memory, with NaN after each row and after the
/// last, and its initial content.
struct Rows {
  int64_t rows = 0, cols = 0, stride = 0;
  std::vector<float> values;  // [rows, stride] and a guard
  Buffer<float> memory;
  MatrixView<float> view() { return {memory.data(), rows, cols, stride}; }
  MatrixView<const float> view() const { return {memory.data(), rows, cols, stride}; }
  double at(int64_t r, int64_t c) const { return static_cast<double>(values[r * stride + c]); }
};

class DecoderOpsTest : public BackendTest {
 protected:
  void SetUp() override {
    BackendTest::SetUp();
    if (!IsSkipped()) ops_ = make_decoder_ops(stream());
    columns_ = pick<int64_t>({1, 4, 15, 16, 17, 64, 67, 192}, {2, 33, 256, 300});
  }
  DecoderOps& ops() { return *ops_; }

  using Element = std::function<double(int64_t row, int64_t col)>;
  /// Rows are aligned for a device's wide accesses only if 8 divides `cols`.
  Rows make(int64_t rows, int64_t cols, const Element& value) {
    Rows x{rows, cols, cols + (cols % 8 == 0 ? 8 : 3), {}, {}};
    x.values.assign(rows * x.stride + 7, std::numeric_limits<float>::quiet_NaN());
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c)
        x.values[r * x.stride + c] = static_cast<float>(value(r, c));
    x.memory = to_device<float>(x.values);
    return x;
  }
  Rows empty(int64_t rows, int64_t cols) {
    return make(rows, cols, [](int64_t, int64_t) { return NAN; });
  }
  Rows random(int64_t rows, int64_t cols, unsigned seed, double size = 1) {
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal;
    return make(rows, cols, [&](int64_t, int64_t) { return size * normal(generator); });
  }

  static double exactly(int64_t, int64_t) { return 0; }
  /// Every element within `tolerance`, and nothing written outside.
  void expect(const Rows& x, const Element& want, const Element& tolerance = exactly) {
    const std::vector<float> got = to_host(x.memory);
    for (int64_t i = 0; i < std::ssize(got); ++i) {
      const int64_t r = i / x.stride, c = i % x.stride;
      if (r < x.rows && c < x.cols)
        EXPECT_NEAR(static_cast<double>(got[i]), want(r, c), tolerance(r, c))
            << "row " << r << " column " << c;
      else
        EXPECT_TRUE(std::isnan(got[i])) << "wrote outside: row " << r << " column " << c;
    }
  }
  std::vector<int64_t> columns_;

 private:
  std::unique_ptr<DecoderOps> ops_;
};

TEST_P(DecoderOpsTest, EmbeddingsAreThoseOfThisRanksTokens) {
  for (const int64_t cols : columns_) {
    const Rows table = random(10, cols, 1);
    Rows out = empty(6, cols);
    const std::vector<int32_t> tokens = {20, 29, 19, 30, 25, 0}, positions(6, 0);
    ops().set_slots(tokens, positions);
    ops().embed(table.view(), 20, out.view());
    expect(out, [&](int64_t r, int64_t c) {
      return tokens[r] >= 20 && tokens[r] < 30 ? table.at(tokens[r] - 20, c) : 0.0;
    });
  }
}

TEST_P(DecoderOpsTest, ResidualsAreAddedAndNormalised) {
  constexpr float eps = 1e-5F;
  const auto check = [&](int64_t cols, bool with_y) {
    Rows x = random(4, cols, 1, 3), h = empty(4, cols);
    const Rows y = random(4, cols, 2), w = random(1, cols, 3);
    const auto sum = [&](int64_t r, int64_t c) { return x.at(r, c) + (with_y ? y.at(r, c) : 0); };
    const auto size = [&](int64_t r, int64_t c) {
      return std::abs(x.at(r, c)) + std::abs(y.at(r, c));
    };
    ops().add_rms_norm(x.view(), with_y ? y.view() : MatrixView<const float>(), w.memory.data(),
                       eps, h.view());
    expect(x, sum, [&](int64_t r, int64_t c) { return with_y ? rounding(1) * size(r, c) : 0; });
    const auto want = [&](int64_t r, int64_t c) {
      double squares = 0;
      for (int64_t i = 0; i < cols; ++i) squares += sum(r, i) * sum(r, i);
      return sum(r, c) / std::sqrt(squares / static_cast<double>(cols) + eps) * w.at(0, c);
    };
    expect(h, want, [&](int64_t r, int64_t c) {
      // A sum that cancels is wrong by roundings of what it was made of.
      const double cancelled = with_y ? size(r, c) / std::abs(sum(r, c)) : 0;
      return rounding(static_cast<double>(cols)) * std::abs(want(r, c)) * (1 + cancelled);
    });
  };
  on_every_target([&] {
    for (const int64_t cols : columns_)
      for (const bool with_y : {false, true}) check(cols, with_y);
  });
}

TEST_P(DecoderOpsTest, ARowOfZerosStaysOne) {
  Rows x = random(1, 40, 1, 0), h = empty(1, 40);
  const Rows w = random(1, 40, 3);
  ops().add_rms_norm(x.view(), {}, w.memory.data(), 1e-5F, h.view());
  expect(h, exactly);
}

TEST_P(DecoderOpsTest, Additions) {
  on_every_target([&] {
    for (const int64_t cols : columns_) {
      Rows x = random(3, cols, 1);
      const Rows y = random(3, cols, 2);
      ops().add(x.view(), y.view());
      expect(x, [&](int64_t r, int64_t c) {
        return static_cast<double>(static_cast<float>(x.at(r, c) + y.at(r, c)));
      });
    }
  });
}

/// An activation function, and a bound of its condition number.
struct GateFunction {
  GateActivation activation;
  double (*value)(double x);
  double (*condition)(double x);
};
inline const GateFunction gate_functions[] = {
    {GateActivation::silu, [](double x) { return x / (1 + std::exp(-x)); },
     [](double x) { return 1 + std::abs(x); }},
    {GateActivation::gelu, [](double x) { return x / 2 * std::erfc(-x / std::sqrt(2)); },
     [](double x) { return 1 + x * x; }},
    // (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)), which keeps its digits where tanh(u) is near -1.
    {GateActivation::gelu_tanh,
     [](double x) {
       const double u = std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
       return x / (1 + std::exp(-2 * u));
     },
     [](double x) { return 1 + std::abs(1.6 * x + 0.22 * x * x * x); }},
    {GateActivation::sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); },
     [](double x) { return 1 + std::abs(x); }},
};

TEST_P(DecoderOpsTest, ActivationsOfTheGateTimesUp) {
  on_every_target([&] {
    for (const GateFunction& function : gate_functions)
      for (const int64_t cols : columns_)
        for (const double size : {1e-20, 1e-3, 1.0, 10.0, 30.0}) {
          Rows gate = random(3, cols, 1, size);
          const Rows up = random(3, cols, 2);
          const auto want = [&](int64_t r, int64_t c) {
            return function.value(gate.at(r, c)) * up.at(r, c);
          };
          ops().gate_multiply(gate.view(), up.view(), function.activation);
          expect(gate, want, [&](int64_t r, int64_t c) {
            // Below 1e-37 f32 has fewer digits.
            return rounding(1) * std::abs(want(r, c)) * function.condition(gate.at(r, c)) + 1e-37;
          });
        }
  });
}

TEST_P(DecoderOpsTest, ActivationsOfExtremes) {
  const double values[] = {-1e30, -1e4, -88, 0, 88, 1e4, 1e30, NAN};
  for (const GateFunction& function : gate_functions) {
    Rows gate = make(1, 8, [&](int64_t, int64_t c) { return values[c]; });
    const Rows up = make(1, 8, [](int64_t, int64_t) { return 1; });
    ops().gate_multiply(gate.view(), up.view(), function.activation);
    const std::vector<float> got = to_host(gate.memory);
    EXPECT_NEAR(got[2], 0, 1e-36);
    const bool is_share = function.activation == GateActivation::sigmoid;  // of up, which is 1
    for (const int64_t c : {0, 1, 3, 4, 5, 6})
      EXPECT_EQ(got[c], is_share ? (c < 3 ? 0 : c == 3 ? 0.5 : 1) : gate.at(0, std::max(c, 3L)));
    EXPECT_TRUE(std::isnan(got[7]));
  }
}

TEST_P(DecoderOpsTest, QueriesAndKeysRotateByTheirPositions) {
  const auto check = [&](int64_t head_dim, const Rotary& rotary,
                         const std::vector<int32_t>& positions) {
    const std::vector<int32_t> tokens(positions.size(), 0);
    const int64_t rows = std::ssize(positions), half = rotary.dim / 2;
    ops().set_slots(tokens, positions);
    Rows q = random(rows, 3 * head_dim, 1), k = random(rows, 2 * head_dim, 2);
    ops().rope(q.view(), k.view(), head_dim, rotary);
    const auto partner = [&](int64_t c) { return c % head_dim < half ? c + half : c - half; };
    for (const Rows* x : {&q, &k})
      expect(
          *x,
          [&](int64_t r, int64_t c) {
            const int64_t i = c % head_dim;
            if (i >= rotary.dim) return x->at(r, c);
            const double angle = positions[r] * rotary.frequencies[i % half];
            const double sign = i < half ? -1 : 1;
            return rotary.scale *
                   (x->at(r, c) * std::cos(angle) + sign * x->at(r, partner(c)) * std::sin(angle));
          },
          [&](int64_t r, int64_t c) {  // at position 0 nothing turns
            if (c % head_dim >= rotary.dim || (positions[r] == 0 && rotary.scale == 1)) return 0.0;
            return rounding(1) * rotary.scale *
                   (std::abs(x->at(r, c)) + std::abs(x->at(r, partner(c))));
          });
  };
  on_every_target([&] {
    // Head dimensions change between calls, and come back.
    for (const int64_t head_dim : pick<int64_t>({2, 6, 8, 32, 64, 80, 128}, {2, 8, 80, 8}))
      for (const double theta : {1e4, 5e5})
        for (const int64_t dim : {head_dim, head_dim / 4 * 2}) {
          if (dim == 0) continue;
          Rotary rotary = plain_rotary(dim, theta);
          if (theta > 1e4) rotary.scale = 1.25;
          check(head_dim, rotary, {0, 1, 2, 2, 255, 256, 257, 5000, 131071, 131072, 1000000, 7});
        }
  });
}

TEST_P(DecoderOpsTest, BiasesAreAddedToEveryRow) {
  on_every_target([&] {
    for (const int64_t cols : columns_) {
      Rows x = random(3, cols, 1);
      const Rows bias = random(1, cols, 2);
      ops().add_bias(x.view(), bias.memory.data());
      expect(x, [&](int64_t r, int64_t c) {
        return static_cast<double>(static_cast<float>(x.at(r, c) + bias.at(0, c)));
      });
    }
  });
}

TEST_P(DecoderOpsTest, EachHeadIsNormalisedByItself) {
  constexpr float eps = 1e-3F;
  on_every_target([&] {
    for (const int64_t head_dim : pick<int64_t>({2, 6, 32, 80, 128}, {2, 80}))
      for (const int64_t heads : {1, 3, 9}) {
        Rows x = random(3, heads * head_dim, 1, 2);
        const Rows w = random(1, head_dim, 2);
        const auto want = [&](int64_t r, int64_t c) {
          const int64_t first = c - c % head_dim;
          double squares = 0;
          for (int64_t i = 0; i < head_dim; ++i) squares += x.at(r, first + i) * x.at(r, first + i);
          const double mean = squares / static_cast<double>(head_dim);
          return x.at(r, c) / std::sqrt(mean + static_cast<double>(eps)) * w.at(0, c % head_dim);
        };
        ops().head_norm(x.view(), head_dim, w.memory.data(), eps);
        expect(x, want, [&](int64_t r, int64_t c) {
          return rounding(static_cast<double>(head_dim)) * std::abs(want(r, c));
        });
      }
  });
}

/// A bf16 matrix in the stream's memory.
struct NarrowRows {
  int64_t rows, cols, stride;
  Buffer<bf16> memory;
  MatrixView<bf16> view() { return {memory.data(), rows, cols, stride}; }
};

TEST_P(DecoderOpsTest, Bf16MatricesHoldTheRoundedResultsOfF32Matrices) {
  constexpr float eps = 1e-5F;
  constexpr int64_t rows = 19, head_dim = 16;  // more rows than the host widens at a time
  std::vector<int32_t> tokens(rows), positions(rows);
  for (int32_t r = 0; r < rows; ++r) {
    tokens[r] = r % 7;
    positions[r] = 1000 * r;
  }
  ops().set_slots(tokens, positions);
  using Run = std::function<void(const std::vector<MatrixRef>&, const float* vector)>;
  const auto check = [&](const char* name, int64_t cols, double slack, const Run& run) {
    SCOPED_TRACE(fmt::format("{}, {} columns", name, cols));
    std::vector<Rows> f32;
    std::vector<NarrowRows> narrow;
    std::vector<MatrixRef> f32_views, narrow_views;
    for (const unsigned seed : {1U, 2U, 3U}) {
      std::mt19937 generator(seed);
      std::normal_distribution<float> normal;
      f32.push_back(make(rows, cols, [&](int64_t, int64_t) {
        return static_cast<double>(to_float(to_bf16(normal(generator))));
      }));
      std::vector<bf16> values;
      for (const float x : f32.back().values) values.push_back(to_bf16(x));
      narrow.push_back({rows, cols, f32.back().stride, to_device<bf16>(values)});
    }
    for (size_t i = 0; i < f32.size(); ++i) {
      f32_views.emplace_back(f32[i].view());
      narrow_views.emplace_back(narrow[i].view());
    }
    const Rows vector = random(1, cols, 4);
    run(f32_views, vector.memory.data());
    run(narrow_views, vector.memory.data());
    for (size_t i = 0; i < f32.size(); ++i) {
      const std::vector<float> want = to_host(f32[i].memory);
      const std::vector<bf16> got = to_host(narrow[i].memory);
      for (size_t j = 0; j < want.size(); ++j) {
        const auto a = static_cast<double>(to_float(got[j])), b = static_cast<double>(want[j]);
        EXPECT_EQ(std::isnan(a), std::isnan(b)) << "array " << i << " element " << j;
        if (std::isnan(b)) continue;
        EXPECT_NEAR(a, b, std::abs(b) * 0x1p-8 * (1 + slack) + slack * 0x1p-8)
            << "array " << i << " element " << j;
      }
    }
  };
  using All = const std::vector<MatrixRef>&;
  for (const int64_t cols : pick<int64_t>({48, 192, 80}, {48, 80})) {
    check("embed", cols, 0,
          [&](All m, const float*) { ops().embed(m[0].rows_from(0, 5), 0, m[1]); });
    check("norm", cols, 0,
          [&](All m, const float* w) { ops().add_rms_norm(m[0], {}, w, eps, m[2]); });
    // The norm is that of a sum which has been rounded.
    check("add and norm", cols, 2,
          [&](All m, const float* w) { ops().add_rms_norm(m[0], m[1], w, eps, m[2]); });
    check("add", cols, 0, [&](All m, const float*) { ops().add(m[0], m[1]); });
    check("bias", cols, 0, [&](All m, const float* bias) { ops().add_bias(m[0], bias); });
    check("head norm", cols, 0,
          [&](All m, const float* w) { ops().head_norm(m[0], head_dim, w, eps); });
    check("rope", cols, 0, [&](All m, const float*) {
      ops().rope(m[0], m[1], head_dim, plain_rotary(head_dim, 1e4));
    });
    for (const GateFunction& function : gate_functions)
      check("gate", cols, 0,
            [&](All m, const float*) { ops().gate_multiply(m[0], m[1], function.activation); });
    check("product", cols, 1e-3, [&](All m, const float*) {
      ops().linear(m[0].columns_from(0, 16), m[1].rows_from(0, 16), m[2]);
    });
  }
}

TEST_P(DecoderOpsTest, AResidualStreamInF32TakesBf16Additions) {
  constexpr int64_t rows = 3;
  for (const int64_t cols : {33, 64}) {
    Rows x = random(rows, cols, 1), h = empty(rows, cols);
    const Rows y = random(rows, cols, 2), w = random(1, cols, 3);
    Buffer<bf16> narrow_memory = to_device<bf16>(std::vector<bf16>(rows * cols));
    Buffer<bf16> h_memory = to_device<bf16>(std::vector<bf16>(rows * cols));
    const MatrixView<bf16> narrow(narrow_memory.data(), rows, cols),
        out(h_memory.data(), rows, cols);
    ops().convert(y.view(), narrow);
    ops().add_rms_norm(x.view(), narrow, w.memory.data(), 1e-5F, out);
    ops().convert(out, h.view());
    const auto sum = [&](int64_t r, int64_t c) {
      return static_cast<double>(static_cast<float>(
          x.at(r, c) + static_cast<double>(to_float(to_bf16(static_cast<float>(y.at(r, c)))))));
    };
    expect(x, sum);
    expect(
        h,
        [&](int64_t r, int64_t c) {
          double squares = 0;
          for (int64_t i = 0; i < cols; ++i) squares += sum(r, i) * sum(r, i);
          return sum(r, c) / std::sqrt(squares / static_cast<double>(cols) + 1e-5) * w.at(0, c);
        },
        [&](int64_t r, int64_t c) { return 0x1p-8 * std::abs(sum(r, c) * w.at(0, c)) * 2; });
  }
}

TEST_P(DecoderOpsTest, NoRowsAreNothingToDo) {
  Rows none = empty(0, 8);
  const Rows w = random(1, 8, 1);
  ops().set_slots({}, {});
  ops().embed(w.view(), 0, none.view());
  ops().add_rms_norm(none.view(), {}, w.memory.data(), 1e-5F, none.view());
  ops().add(none.view(), none.view());
  ops().add_bias(none.view(), w.memory.data());
  ops().head_norm(none.view(), 4, w.memory.data(), 1e-5F);
  ops().rope(none.view(), none.view(), 8, plain_rotary(8, 1e4));
  ops().gate_multiply(none.view(), none.view(), GateActivation::gelu);
  stream().synchronize();
}

}  // namespace gyre::test::decoder_ops
