// Folding scratch rows of ragged batches into results, against double precision.

#include "attention/merge.hpp"

#include <fmt/format.h>

#include <cmath>
#include <random>
#include <vector>

#include "attention/kernels/cuda_merge.hpp"
#include "close.hpp"
#include "gpu_test.hpp"
#include "mpi_test.hpp"
#include "report/tolerance.hpp"

namespace gyre {
namespace GYRE_FILE {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr int64_t guard = 3;  // rows behind, and columns beside, what is touched

/// A matrix in f32 on the host and in its type on the device, NaN beside its columns and behind its
/// rows.
struct Matrix {
  DType type;
  int64_t rows, cols, stride;
  std::vector<float> host;  // [rows + guard, stride]
  Buffer<std::byte> device;

  MatrixRef ref() { return {device.data(), type, rows, cols, stride}; }
  MatrixView<float> view() { return ref().as<float>(); }
  float& at(int64_t r, int64_t c) { return host[static_cast<size_t>(r * stride + c)]; }
};

class Merge : public test::GpuTest {
 protected:
  Matrix make(DType type, int64_t rows, int64_t cols, int64_t pad) {
    Matrix m{type, rows, cols, cols + pad, {}, {}};
    m.host.assign(static_cast<size_t>((rows + guard) * m.stride), NAN);
    std::normal_distribution<float> normal;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) m.at(r, c) = stored(type, normal(random_));
    return m;
  }

  void upload(Matrix& m) {
    m.device = Buffer<std::byte>(static_cast<int64_t>(m.host.size() * size_of(m.type)),
                                 MemorySpace::device);
    if (m.type == DType::f32) {
      stream().copy(m.device.data(), m.host.data(), m.host.size() * sizeof(float));
    } else {
      std::vector<bf16> rounded;
      for (const float x : m.host) rounded.push_back(to_bf16(x));
      stream().copy(m.device.data(), rounded.data(), rounded.size() * sizeof(bf16));
    }
    stream().synchronize();
  }

  std::vector<float> download(const Matrix& m) {
    const std::vector<std::byte> bytes = to_host(m.device);
    std::vector<float> values(m.host.size());
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = m.type == DType::f32 ? reinterpret_cast<const float*>(bytes.data())[i]
                                       : to_float(reinterpret_cast<const bf16*>(bytes.data())[i]);
    return values;
  }

  DeviceRound round_of(const Round& round) {
    pieces_ = to_device<RowPiece>(round);
    int64_t longest = 0;
    for (const RowPiece& p : round) longest = std::max(longest, p.length);
    return {pieces_.data(), std::ssize(round), longest};
  }

  static float stored(DType type, float x) { return type == DType::f32 ? x : to_float(to_bf16(x)); }

  std::mt19937 random_{7};
  Buffer<RowPiece> pieces_;
};

/// What the device may be wrong by, relative to values of about 1: the arithmetic of a merge in f32
/// and the rounding of what is stored.
double tolerance(DType type) {
  return tolerance_for(DType::f32, roundings_per_merge + 1) +
         (type == DType::bf16 ? tolerance_for(DType::bf16, 1) : 0);
}

/// Elements in no row of the round must be as they were, NaN included.
void expect_result(const Matrix& m, const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const std::string place = fmt::format("row {}, column {}", static_cast<int64_t>(i) / m.stride,
                                          static_cast<int64_t>(i) % m.stride);
    if (std::isnan(want[i])) {
      ASSERT_TRUE(std::isnan(got[i])) << place;
    } else if (got[i] != want[i]) {  // infinities are equal
      ASSERT_NEAR(got[i], want[i], tolerance(m.type) * (1 + std::abs(want[i]))) << place;
    }
  }
}

struct Shape {
  int64_t heads, head_dim, pad;
  DType partial, out;
};
const Shape shapes[] = {{3, 16, 0, DType::bf16, DType::f32},
                        {3, 16, 8, DType::bf16, DType::bf16},
                        {2, 5, 1, DType::f32, DType::f32},
                        {1, 72, 8, DType::f32, DType::bf16},
                        {300, 8, 0, DType::bf16, DType::bf16}};
const Round pieces = {{4, 0, 5}, {1, 9, 1}, {10, 5, 4}};

TEST_F(Merge, RowsAreMergedAndNothingElseIsTouched) {
  for (const Update update : {Update::add, Update::replace})
    for (const Shape& s : shapes) {
      const int64_t columns = s.heads * s.head_dim;
      Matrix partial = make(s.partial, 10, columns, s.pad),
             partial_lse = make(DType::f32, 10, s.heads, 0);
      Matrix out = make(s.out, 15, columns, s.pad), lse = make(DType::f32, 15, s.heads, 2);
      const auto empty = [&](Matrix& o, Matrix& l, int64_t row, int64_t h, float content) {
        l.at(row, h) = -infinity;
        for (int64_t d = 0; d < s.head_dim; ++d) o.at(row, h * s.head_dim + d) = content;
      };
      empty(out, lse, 5, 0, NAN);              // nothing there before: not read
      empty(partial, partial_lse, 2, 0, NAN);  // nothing new for row 6
      empty(out, lse, 12, 0, 0);               // nothing on either side
      empty(partial, partial_lse, 7, 0, NAN);
      for (Matrix* m : {&partial, &partial_lse, &out, &lse}) upload(*m);

      std::vector<float> want = out.host, want_lse = lse.host;
      for (const RowPiece& p : pieces)
        for (int64_t i = 0; i < p.length; ++i)
          for (int64_t h = 0; h < s.heads; ++h) {
            const auto before = static_cast<double>(lse.at(p.row + i, h));
            const auto w = merge_lse<double>(update == Update::add ? before : -HUGE_VAL,
                                             partial_lse.at(p.scratch + i, h));
            want_lse[static_cast<size_t>((p.row + i) * lse.stride + h)] = static_cast<float>(w.lse);
            for (int64_t c = h * s.head_dim; c < (h + 1) * s.head_dim; ++c)
              want[static_cast<size_t>((p.row + i) * out.stride + c)] =
                  static_cast<float>((w.w1 > 0 ? w.w1 * out.at(p.row + i, c) : 0) +
                                     (w.w2 > 0 ? w.w2 * partial.at(p.scratch + i, c) : 0));
          }
      cuda_merge_rows(round_of(pieces), partial.ref(), partial_lse.view(), out.ref(), lse.view(),
                      update, stream());
      expect_result(out, download(out), want);
      expect_result(lse, download(lse), want_lse);
    }
}

TEST_F(Merge, TheStandInHasTheDeltaOfTheOutput) {
  for (const Shape& s : shapes) {
    const int64_t columns = s.heads * s.head_dim;
    Matrix d_out = make(s.partial, 15, columns, s.pad), lse = make(DType::f32, 15, s.heads, 1);
    Matrix delta = make(DType::f32, 15, s.heads, 1);
    Matrix stand_in = make(s.partial, 10, columns, s.pad);
    Matrix scratch_lse = make(DType::f32, 10, s.heads, 0);
    for (float& x : stand_in.host) x = NAN;
    for (float& x : scratch_lse.host) x = NAN;
    for (int64_t c = 0; c < s.head_dim; ++c) {
      d_out.at(5, c) = 0;  // no gradient, hence no delta
      d_out.at(6, c) *= 0x1p-100F;
      d_out.at(7, c) *= 0x1p+100F;
    }
    delta.at(5, 0) = 0;
    delta.at(6, 0) *= 0x1p-100F;
    delta.at(7, 0) *= 0x1p+100F;
    lse.at(10, 0) = -infinity;
    for (Matrix* m : {&d_out, &lse, &delta, &stand_in, &scratch_lse}) upload(*m);

    cuda_stand_in_rows(round_of(pieces), d_out.ref(), lse.view(), delta.view(), stand_in.ref(),
                       scratch_lse.view(), stream());
    const std::vector<float> got = download(stand_in), got_lse = download(scratch_lse);
    for (const RowPiece& p : pieces)
      for (int64_t i = 0; i < p.length; ++i)
        for (int64_t h = 0; h < s.heads; ++h) {
          double sum = 0;
          for (int64_t c = h * s.head_dim; c < (h + 1) * s.head_dim; ++c)
            sum += static_cast<double>(
                       got[static_cast<size_t>((p.scratch + i) * stand_in.stride + c)]) *
                   d_out.at(p.row + i, c);
          const double want = delta.at(p.row + i, h);
          EXPECT_NEAR(sum, want, epsilon_of(s.partial) * std::abs(want));
          const float l = lse.at(p.row + i, h);
          EXPECT_EQ(got_lse[static_cast<size_t>((p.scratch + i) * scratch_lse.stride + h)],
                    l == -infinity ? infinity : l);
        }
    for (size_t i = static_cast<size_t>(10 * stand_in.stride); i < got.size(); ++i)
      EXPECT_TRUE(std::isnan(got[i]));
  }
}

TEST_F(Merge, RowsAreAddedOrReplacedAndNothingElseIsTouched) {
  for (const Update update : {Update::add, Update::replace})
    for (const Shape& s : shapes) {
      const int64_t columns = s.heads * s.head_dim;
      Matrix partial = make(s.partial, 10, columns, s.pad), sum = make(s.out, 15, columns, s.pad);
      if (update == Update::replace) sum.at(5, 0) = NAN;
      upload(partial);
      upload(sum);
      std::vector<float> want = sum.host;
      for (const RowPiece& p : pieces)
        for (int64_t i = 0; i < p.length; ++i)
          for (int64_t c = 0; c < columns; ++c) {
            float& x = want[static_cast<size_t>((p.row + i) * sum.stride + c)];
            x = (update == Update::add ? x : 0) + partial.at(p.scratch + i, c);
          }
      cuda_add_rows(round_of(pieces), partial.ref(), sum.ref(), update, stream());
      expect_result(sum, download(sum), want);
    }
}

TEST_F(Merge, RowsAreFilledAndNothingElseIsTouched) {
  for (const bool all : {false, true})
    for (const float value : {0.0F, -infinity})
      for (const Shape& s : shapes) {
        const int64_t columns = s.heads * s.head_dim;
        Matrix m = make(s.out, 15, columns, s.pad);
        m.at(5, 0) = NAN;
        upload(m);
        std::vector<float> want = m.host;
        for (const RowPiece& p : all ? Round{{0, 0, 15}} : pieces)
          for (int64_t i = 0; i < p.length; ++i)
            for (int64_t c = 0; c < columns; ++c)
              want[static_cast<size_t>((p.row + i) * m.stride + c)] = value;
        cuda_fill_rows(all ? DeviceRound{nullptr, 1, 15} : round_of(pieces), m.ref(), value,
                       stream());
        expect_result(m, download(m), want);
      }
}

TEST_F(Merge, MorePiecesThanBlocksSideBySide) {
  constexpr int64_t count = 70000;
  Round all;
  for (int64_t r = 0; r < count; ++r) all.push_back({r, 0, 1});
  Matrix m = make(DType::f32, count + 1, 1, 0);
  upload(m);
  std::vector<float> want = m.host;
  std::fill_n(want.begin(), count, 3.0F);
  cuda_fill_rows(round_of(all), m.ref(), 3, stream());
  expect_result(m, download(m), want);
}

TEST_F(Merge, ARoundOfNothingIsNothingToDo) {
  Matrix partial = make(DType::f32, 1, 8, 0), sum = make(DType::f32, 1, 8, 0);
  upload(partial);
  upload(sum);
  cuda_add_rows({}, partial.ref(), sum.ref(), Update::add, stream());
  expect_result(sum, download(sum), sum.host);
}

TEST_F(Merge, MatricesOfOtherWidthsAreRefused) {
  Matrix narrow = make(DType::f32, 4, 8, 0), wide = make(DType::f32, 4, 16, 0);
  EXPECT_THROW(cuda_add_rows({}, narrow.ref(), wide.ref(), Update::add, stream()), std::exception);
}

}  // namespace GYRE_FILE
}  // namespace gyre
