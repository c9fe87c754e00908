// The largest logits of rows, with ties, -inf, NaN and padding, against sorting the whole row; and
// the partials that are taken on the way.

#include "logprobs/row_selection.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>

#include "logprob_cases.hpp"
#include "logprobs/reference.hpp"
#include "report/tolerance.hpp"
#include "simd_targets.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::LogitRows;
using test::Matrix;
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

struct Selection {
  std::vector<float> values;
  std::vector<int32_t> ids, last;
  std::vector<SoftmaxPartial> partials;

  Selection(const Matrix& logits, int64_t columns, int64_t length, int threads = 1)
      : values(static_cast<size_t>(logits.rows() * length)),
        ids(values.size()),
        last(static_cast<size_t>(logits.rows())),
        partials(last.size()) {
    row_top(logits.ref(), {columns, 0.5F, true, threads}, {values, ids, last, length}, partials);
  }
  bool operator==(const Selection& other) const {
    return values == other.values && ids == other.ids && last == other.last;
  }
};

/// The first row of a selection, as it follows from the definition: all columns sorted.
Selection sorted(std::span<const double> row, int64_t length) {
  Selection want(Matrix(0, 0, DType::f32), 0, length);
  for (const TopEntry& entry : top_k_reference(row, length)) {
    want.values.push_back(static_cast<float>(entry.value));
    want.ids.push_back(entry.id);
  }
  want.values.resize(static_cast<size_t>(length), static_cast<float>(-infinity));
  want.ids.resize(static_cast<size_t>(length), -1);
  const auto last = static_cast<double>(want.values.back());
  want.last = {static_cast<int32_t>(std::count(row.begin(), row.end(), last))};
  return want;
}

/// A matrix of one row, with two columns of padding.
Matrix padded_row(std::span<const double> row, DType type) {
  Matrix matrix(1, std::ssize(row) + 2, type);
  for (int64_t v = 0; v < std::ssize(row); ++v) matrix.set(0, v, row[static_cast<size_t>(v)]);
  return matrix;
}

Selection select(std::span<const double> row, int64_t length, DType type = DType::f32) {
  return {padded_row(row, type), std::ssize(row), length};
}

TEST(RowTop, IsTheStartOfTheSortedRow) {
  test::on_every_simd_target([] {
    EXPECT_TRUE(rc::check("row_top and sorting", [] {
      const DType type = *rc::gen::element(DType::f32, DType::bf16);
      const int64_t columns = *rc::gen::weightedOneOf<int64_t>(
          {{2, rc::gen::inRange<int64_t>(1, 100)}, {1, rc::gen::inRange<int64_t>(1000, 12000)}});
      const int64_t length = *rc::gen::weightedOneOf<int64_t>(
          {{2, rc::gen::element<int64_t>(1, 2, 64)}, {1, rc::gen::inRange<int64_t>(1, 800)}});
      LogitRows rows = test::random_logits(1, columns, type, 2, *rc::gen::inRange<uint64_t>(0, 99));
      // Steps make ties; so many that most are -inf, too.
      const double step = *rc::gen::element(0.0, 0.25, 2.0);
      const double least = *rc::gen::element(-infinity, -1.0, 3.0);
      for (double& z : rows.values) {
        if (step > 0) z = std::round(z / step) * step;
        if (z < least) z = -infinity;
      }
      const Selection top = select(rows.row(0), length, type), want = sorted(rows.row(0), length);
      RC_ASSERT(top.values == want.values);
      RC_ASSERT(top.ids == want.ids);
      RC_ASSERT(top.last == want.last);
    }));
  });
}

TEST(RowTop, ARowInAscendingOrderReplacesItsListAllTheTime) {
  LogitRows rows(1, 9000);
  for (int64_t v = 0; v < 9000; ++v) rows.at(0, v) = static_cast<double>(v / 3);
  test::on_every_simd_target([&] {
    for (const int64_t length : {1, 2, 64, 1000})
      EXPECT_TRUE(select(rows.row(0), length) == sorted(rows.row(0), length)) << length;
  });
}

TEST(RowTop, TiesOfTheLastValueAreCountedInTheWholeRow) {
  LogitRows rows(1, 10000);
  rows.at(0, 7) = rows.at(0, 9999) = 1;
  const Selection top = select(rows.row(0), 4);
  EXPECT_EQ(top.values, (std::vector<float>{1, 1, 0, 0}));
  EXPECT_EQ(top.ids, (std::vector<int32_t>{7, 9999, 0, 1}));
  EXPECT_EQ(top.last, std::vector<int32_t>{9998});
}

TEST(RowTop, ZerosOfBothSignsAreTies) {
  test::on_every_simd_target([] {
    LogitRows rows(1, 6000);
    for (int64_t v = 0; v < 6000; ++v) rows.at(0, v) = v % 2 == 0 ? 0.0 : -0.0;
    for (int64_t v = 0; v < 6000; v += 7) rows.at(0, v) = -1e-40;
    for (const int64_t length : {5, 900}) {
      const Selection top = select(rows.row(0), length);
      EXPECT_TRUE(top == sorted(rows.row(0), length)) << length;
      EXPECT_EQ(top.last, std::vector<int32_t>{6000 - 858});
    }
  });
}

TEST(RowTop, ListsLongerThanTheRowEndInMinusInfinity) {
  const std::vector<double> row = {2, -infinity, 3, -infinity};
  const Selection top = select(row, 6);
  constexpr float none = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(top.values, (std::vector<float>{3, 2, none, none, none, none}));
  EXPECT_EQ(top.ids, (std::vector<int32_t>{2, 0, 1, 3, -1, -1}));
  EXPECT_EQ(top.last, std::vector<int32_t>{2});
  EXPECT_EQ(select({}, 2).ids, (std::vector<int32_t>{-1, -1}));
}

TEST(RowTop, NotANumberRanksAsTheLargest) {
  test::on_every_simd_target([] {
    LogitRows rows = test::random_logits(1, 5000, DType::f32);
    for (const int64_t v : {4, 3000, 4999})
      rows.at(0, v) = v == 3000 ? -not_a_number : not_a_number;
    rows.at(0, 77) = infinity;
    const Selection top = select(rows.row(0), 8);
    EXPECT_EQ(std::vector(top.ids.begin(), top.ids.begin() + 4),
              (std::vector<int32_t>{4, 3000, 4999, 77}));
    for (int i = 0; i < 8; ++i)
      EXPECT_EQ(std::isnan(top.values[static_cast<size_t>(i)]), i < 3) << i;
    EXPECT_TRUE(std::isnan(top.partials[0].sum));
    std::fill(rows.values.begin() + 5, rows.values.end(), not_a_number);
    EXPECT_EQ(select(rows.row(0), 3).ids, (std::vector<int32_t>{4, 5, 6}));
  });
}

TEST(RowTop, MomentsAreThoseOfTheWholeRow) {
  constexpr int64_t columns = 150000;  // more than are taken at once
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = test::random_logits(3, columns, type, 3);
    for (int64_t v = 0; v < columns; ++v) {
      if (v < 70000) rows.at(1, v) = -infinity;
      rows.at(2, v) = -infinity;
    }
    const Matrix matrix = rows.shard(balanced_partition(columns, 1), 0, type);
    const Selection top(matrix, columns, 16);
    for (int64_t r = 0; r < 2; ++r) {
      const SoftmaxPartial& m = top.partials[static_cast<size_t>(r)];
      EXPECT_EQ(m.max, top.values[static_cast<size_t>(16 * r)]);
      const TokenScore want = score_row_reference(rows.row(r), 90000, 2);
      const double x = (rows.at(r, 90000) - static_cast<double>(m.max)) / 2;
      const double log_sum = std::log(static_cast<double>(m.sum));
      EXPECT_NEAR(x - log_sum, want.logprob, logprob_tolerance() * logprob_scale(want.logprob));
      EXPECT_NEAR(log_sum - static_cast<double>(m.weighted) / static_cast<double>(m.sum),
                  want.entropy, logprob_tolerance() * entropy_scale(columns));
    }
    EXPECT_EQ(top.partials[2].sum, 0.0F);
    EXPECT_EQ(top.partials[2].weighted, 0.0F);
    EXPECT_EQ(top.partials[2].max, static_cast<float>(-infinity));
  }
}

TEST(RowTop, UnwantedResultsAreLeftOut) {
  const Matrix matrix = padded_row(std::vector<double>{1, 3, 2}, DType::bf16);
  std::vector<float> values(2);
  row_top(matrix.ref(), {3}, {values, {}, {}, 2}, {});
  EXPECT_EQ(values, (std::vector<float>{3, 2}));
  std::vector<SoftmaxPartial> partials(1);
  row_top(matrix.ref(), {3}, {values, {}, {}, 2}, partials);
  EXPECT_EQ(partials[0].weighted, 0.0F);
}

TEST(RowTop, BitsDoNotDependOnThreads) {
  const LogitRows rows = test::random_logits(37, 5000, DType::f32);
  const Matrix matrix = rows.shard(balanced_partition(5000, 1), 0, DType::f32);
  const Selection one(matrix, 5000, 20, 1), four(matrix, 5000, 20, 4);
  EXPECT_TRUE(one == four);
  for (size_t r = 0; r < 37; ++r) {
    EXPECT_EQ(one.partials[r].sum, four.partials[r].sum);
    EXPECT_EQ(one.partials[r].weighted, four.partials[r].weighted);
  }
}

TEST(RowTop, TheFiveLargestOfGoldenRows) {
  const LogitRows rows = test::golden_logits();
  const Selection first = select(rows.row(0), 5), last = select(rows.row(15), 5, DType::bf16);
  EXPECT_EQ(first.ids, (std::vector<int32_t>{57, 17, 34, 51, 11}));
  EXPECT_EQ(first.values, (std::vector<float>{6, 5.875F, 5.625F, 5.375F, 5.25F}));
  EXPECT_EQ(last.ids, (std::vector<int32_t>{8, 25, 42, 2, 59}));
}

}  // namespace GYRE_FILE
}  // namespace gyre
