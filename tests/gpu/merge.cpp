// Merges scratch rows of ragged batches into results, against double precision. Elements in no row
// of a round stay as they are.

#include "attention/merge.hpp"

#include <cmath>
#include <random>
#include <vector>

#include "attention/kernels/cuda_merge.hpp"
#include "core/tolerance.hpp"
#include "device_matrix.hpp"
#include "gpu_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::DeviceMatrix;
using test::Matrix;

constexpr double infinity = std::numeric_limits<double>::infinity();

/// What the device may be wrong by, relative to values of about 1: the arithmetic of a merge in f32
/// and the rounding of what is stored.
double tolerance(DType type) {
  return tolerance_for(DType::f32, roundings_per_merge + 1) +
         (type == DType::bf16 ? tolerance_for(DType::bf16, 1) : 0);
}

class Merge : public test::GpuTest {
 protected:
  Matrix normal(DType type, int64_t rows, int64_t cols) {
    std::normal_distribution<double> distribution;
    Matrix m(rows, cols, type);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) m.set(r, c, distribution(random_));
    return m;
  }
  DeviceMatrix upload(const Matrix& m, int64_t gap = 0) { return {m.ref(), stream(), 0, gap}; }

  DeviceRound round_of(const Round& round) {
    pieces_ = to_device<RowPiece>(round);
    int64_t longest = 0;
    for (const RowPiece& p : round) longest = std::max(longest, p.length);
    return {pieces_.data(), std::ssize(round), longest};
  }
  static void expect_result(DeviceMatrix& there, const Matrix& want) {
    const Matrix got = there.host();
    for (int64_t r = 0; r < got.rows(); ++r)
      for (int64_t c = 0; c < got.cols(); ++c) {
        const double x = got.at(r, c), y = want.at(r, c);
        if (x == y || (std::isnan(x) && std::isnan(y))) continue;  // infinities are equal
        ASSERT_NEAR(x, y, tolerance(there.ref().type) * (1 + std::abs(y)))
            << "row " << r << ", column " << c;
      }
  }

 private:
  std::mt19937 random_{7};
  Buffer<RowPiece> pieces_;
};

struct Shape {
  int64_t heads, head_dim, pad;
  DType partial, out;
  int64_t columns() const { return heads * head_dim; }
};
const Shape shapes[] = {{3, 16, 0, DType::bf16, DType::f32},
                        {3, 16, 8, DType::bf16, DType::bf16},
                        {2, 5, 1, DType::f32, DType::f32},
                        {1, 72, 8, DType::f32, DType::bf16},
                        {300, 8, 0, DType::bf16, DType::bf16}};
const Round pieces = {{4, 0, 5}, {1, 9, 1}, {10, 5, 4}};

/// Calls f(row, scratch row) for the rows of a round.
template <class F>
void for_each_row(const Round& round, F f) {
  for (const RowPiece& p : round)
    for (int64_t i = 0; i < p.length; ++i) f(p.row + i, p.scratch + i);
}

TEST_F(Merge, RowsAreMergedAndNothingElseIsTouched) {
  const auto check = [&](const Shape& s, Update update) {
    Matrix partial = normal(s.partial, 10, s.columns()),
           partial_lse = normal(DType::f32, 10, s.heads), out = normal(s.out, 15, s.columns()),
           lse = normal(DType::f32, 15, s.heads);
    const auto empty = [&](Matrix& o, Matrix& l, int64_t row, double content) {
      l.set(row, 0, -infinity);
      for (int64_t d = 0; d < s.head_dim; ++d) o.set(row, d, content);
    };
    empty(out, lse, 5, NAN);              // nothing there before: not read
    empty(partial, partial_lse, 2, NAN);  // nothing new for row 6
    empty(out, lse, 12, 0);               // nothing on either side
    empty(partial, partial_lse, 7, NAN);
    DeviceMatrix on_partial = upload(partial, s.pad), on_partial_lse = upload(partial_lse),
                 on_out = upload(out, s.pad), on_lse = upload(lse, 2);
    Matrix want = out, want_lse = lse;
    for_each_row(pieces, [&](int64_t row, int64_t scratch) {
      for (int64_t h = 0; h < s.heads; ++h) {
        const auto w = merge_lse<double>(update == Update::add ? lse.at(row, h) : -infinity,
                                         partial_lse.at(scratch, h));
        want_lse.set(row, h, w.lse);
        for (int64_t c = h * s.head_dim; c < (h + 1) * s.head_dim; ++c)
          want.set(row, c,
                   (w.w1 > 0 ? w.w1 * out.at(row, c) : 0) +
                       (w.w2 > 0 ? w.w2 * partial.at(scratch, c) : 0));
      }
    });
    cuda_merge_rows(round_of(pieces), on_partial.ref(), on_partial_lse.ref().as<float>(),
                    on_out.ref(), on_lse.ref().as<float>(), update, stream());
    expect_result(on_out, want);
    expect_result(on_lse, want_lse);
  };
  for (const Shape& s : shapes)
    for (const Update update : {Update::add, Update::replace}) check(s, update);
}

TEST_F(Merge, TheStandInHasTheDeltaOfTheOutput) {
  for (const Shape& s : shapes) {
    Matrix d_out = normal(s.partial, 15, s.columns()), lse = normal(DType::f32, 15, s.heads),
           delta = normal(DType::f32, 15, s.heads);
    // A row without gradient, whose delta is 0, and very small and very large gradients.
    for (const auto& [row, factor] : {std::pair{5, 0.0}, {6, 0x1p-100}, {7, 0x1p+100}}) {
      for (int64_t c = 0; c < s.head_dim; ++c) d_out.set(row, c, factor * d_out.at(row, c));
      delta.set(row, 0, factor * delta.at(row, 0));
    }
    lse.set(10, 0, -infinity);
    DeviceMatrix on_d_out = upload(d_out, s.pad), on_lse = upload(lse, 1),
                 on_delta = upload(delta, 1),
                 stand_in = upload(Matrix(10, s.columns(), s.partial), s.pad),
                 scratch_lse = upload(Matrix(10, s.heads, DType::f32));
    cuda_stand_in_rows(round_of(pieces), on_d_out.ref(), on_lse.ref().as<float>(),
                       on_delta.ref().as<float>(), stand_in.ref(), scratch_lse.ref().as<float>(),
                       stream());
    const Matrix got = stand_in.host(), got_lse = scratch_lse.host();
    for_each_row(pieces, [&](int64_t row, int64_t scratch) {
      for (int64_t h = 0; h < s.heads; ++h) {
        double sum = 0;
        for (int64_t c = h * s.head_dim; c < (h + 1) * s.head_dim; ++c)
          sum += got.at(scratch, c) * d_out.at(row, c);
        const double want = delta.at(row, h), l = lse.at(row, h);
        // Exact to about two roundings, not one, unless the head has a single element.
        const double epsilon = epsilon_of(s.partial);
        EXPECT_NEAR(sum, want, (s.head_dim > 1 ? epsilon * epsilon : epsilon) * std::abs(want));
        EXPECT_EQ(got_lse.at(scratch, h), l == -infinity ? infinity : l);
      }
    });
  }
}

TEST_F(Merge, RowsAreAddedOrReplacedAndNothingElseIsTouched) {
  for (const Update update : {Update::add, Update::replace})
    for (const Shape& s : shapes) {
      const Matrix partial = normal(s.partial, 10, s.columns());
      Matrix sum = normal(s.out, 15, s.columns());
      if (update == Update::replace) sum.set(5, 0, NAN);
      DeviceMatrix on_partial = upload(partial, s.pad), on_sum = upload(sum, s.pad);
      Matrix want = sum;
      for_each_row(pieces, [&](int64_t row, int64_t scratch) {
        for (int64_t c = 0; c < s.columns(); ++c)
          want.set(row, c, (update == Update::add ? sum.at(row, c) : 0) + partial.at(scratch, c));
      });
      cuda_add_rows(round_of(pieces), on_partial.ref(), on_sum.ref(), update, stream());
      expect_result(on_sum, want);
      // Two pairs at once.
      DeviceMatrix first = upload(sum, s.pad), second = upload(sum, s.pad),
                   other = upload(normal(s.partial, 10, s.columns()), s.pad);
      const Matrix other_values = other.host();
      Matrix other_want = sum;
      for_each_row(pieces, [&](int64_t row, int64_t scratch) {
        for (int64_t c = 0; c < s.columns(); ++c)
          other_want.set(
              row, c, (update == Update::add ? sum.at(row, c) : 0) + other_values.at(scratch, c));
      });
      const RowSums both[] = {{on_partial.ref(), first.ref()}, {other.ref(), second.ref()}};
      cuda_add_rows(round_of(pieces), both, update, stream());
      expect_result(first, want);
      expect_result(second, other_want);
    }
}

TEST_F(Merge, RowsAreFilledAndNothingElseIsTouched) {
  for (const bool all : {false, true})
    for (const double value : {0.0, -infinity})
      for (const Shape& s : shapes) {
        Matrix m = normal(s.out, 15, s.columns());
        m.set(5, 0, NAN);
        DeviceMatrix there = upload(m, s.pad);
        for_each_row(all ? Round{{0, 0, 15}} : pieces, [&](int64_t row, int64_t) {
          for (int64_t c = 0; c < s.columns(); ++c) m.set(row, c, value);
        });
        cuda_fill_rows(all ? DeviceRound{nullptr, 1, 15} : round_of(pieces), there.ref(),
                       static_cast<float>(value), stream());
        expect_result(there, m);
      }
}

TEST_F(Merge, MorePiecesThanBlocksSideBySide) {
  constexpr int64_t count = 70000;
  Round all;
  Matrix m = normal(DType::f32, count + 1, 1);
  DeviceMatrix there = upload(m);
  for (int64_t r = 0; r < count; ++r) all.push_back({r, 0, 1}), m.set(r, 0, 3);
  cuda_fill_rows(round_of(all), there.ref(), 3, stream());
  expect_result(there, m);
}

TEST_F(Merge, ARoundOfNothingIsNothingToDoAndOtherWidthsAreRefused) {
  const Matrix values = normal(DType::f32, 4, 8);
  DeviceMatrix partial = upload(values), sum = upload(values),
               wide = upload(normal(DType::f32, 4, 16));
  cuda_add_rows({}, partial.ref(), sum.ref(), Update::add, stream());
  expect_result(sum, values);
  EXPECT_THROW(cuda_add_rows({}, partial.ref(), wide.ref(), Update::add, stream()), std::exception);
}

}  // namespace GYRE_FILE
}  // namespace gyre
