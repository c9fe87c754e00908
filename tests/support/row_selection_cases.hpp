#pragma once
// The largest logits of rows, with ties, -inf, NaN and padding, on every backend, against sorting
// the whole row; and the partials that are taken on the way.

#include <rapidcheck.h>

#include <algorithm>

#include "row_kernel_test.hpp"

namespace gyre::test::row_kernels {

struct Selection {
  std::vector<float> values;
  std::vector<int32_t> ids, last;
  std::vector<SoftmaxPartial> partials;

  bool operator==(const Selection& other) const {
    const auto same = [](const SoftmaxPartial& a, const SoftmaxPartial& b) {
      return a.max == b.max && a.sum == b.sum && a.weighted == b.weighted;
    };
    return values == other.values && ids == other.ids && last == other.last &&
           std::ranges::equal(partials, other.partials, same);
  }
};

/// Random rows in steps of this size, which make ties, and -inf below `least`.
inline LogitRows stepped(int64_t tokens, int64_t columns, DType type, double step, double least,
                         uint64_t seed = 1) {
  LogitRows rows = random_logits(tokens, columns, type, 2, seed);
  for (double& z : rows.values) {
    if (step > 0) z = std::round(z / step) * step;
    if (z < least) z = none;
  }
  return rows;
}

class RowSelection : public RowKernelTest {
 protected:
  Selection select(const Matrix& logits, int64_t columns, int64_t length, int64_t lead = 0,
                   int threads = 1) {
    const DeviceMatrix there(logits.ref(), stream(), lead);
    Selection got{std::vector<float>(logits.rows() * length, -77), {}, {}, {}};
    got.ids.assign(got.values.size(), -77);
    got.last.assign(logits.rows(), -77);
    got.partials.resize(got.last.size());
    kernels().top(there.ref(), {columns, 0.5F, true, threads},
                  {got.values, got.ids, got.last, length}, got.partials);
    return got;
  }
  Selection select(const LogitRows& rows, int64_t length, DType type = DType::f32,
                   int64_t lead = 0) {
    return select(padded(rows, type), rows.vocab_size, length, lead);
  }
  /// Compares with the definition, all columns sorted, and returns what was got.
  Selection expect_sorted(const LogitRows& rows, int64_t length, DType type = DType::f32,
                          int64_t lead = 0) {
    const Selection got = select(rows, length, type, lead);
    for (int64_t t = 0; t < rows.tokens; ++t) {
      SCOPED_TRACE(testing::Message() << "row " << t << " of " << rows.vocab_size << " columns, "
                                      << length << " wanted, " << name_of(type));
      const auto row = rows.row(t);
      std::vector<TopEntry> want = top_k_reference(row, length);
      want.resize(length, {none, -1});
      int64_t wrong = 0;
      for (int64_t k = 0; k < length; ++k) {
        const auto at = static_cast<size_t>(t * length + k);
        const TopEntry& entry = want[k];
        wrong += static_cast<double>(got.values[at]) != entry.value || got.ids[at] != entry.id;
      }
      EXPECT_EQ(wrong, 0) << "entries";
      EXPECT_EQ(got.last[t], std::count(row.begin(), row.end(), want.back().value));
    }
    return got;
  }
};

TEST_P(RowSelection, IsTheStartOfTheSortedRow) {
  for (const DType type : both_types)
    for (const int64_t columns : {1, 9, 100, 2050, 5000})
      for (const int64_t length : {1, 2, 64, 700})
        for (const double step : {0.0, 0.25, 2.0})
          expect_sorted(stepped(1, columns, type, step, step == 2 ? 3 : none), length, type,
                        columns % 3);
  if (!on_host()) return;
  on_every_target([&] {
    EXPECT_TRUE(rc::check("row_top and sorting", [&] {
      const DType type = *rc::gen::elementOf(both_types);
      const int64_t columns = *rc::gen::weightedOneOf<int64_t>(
          {{2, rc::gen::inRange<int64_t>(1, 100)}, {1, rc::gen::inRange<int64_t>(1000, 12000)}});
      const int64_t length = *rc::gen::weightedOneOf<int64_t>(
          {{2, rc::gen::element<int64_t>(1, 2, 64)}, {1, rc::gen::inRange<int64_t>(1, 800)}});
      const auto seed = *rc::gen::inRange<uint64_t>(0, 99);
      expect_sorted(stepped(1, columns, type, *rc::gen::element(0.0, 0.25, 2.0),
                            *rc::gen::element(none, -1.0, 3.0), seed),
                    length, type);
      RC_ASSERT(!HasFailure());
    }));
  });
}

TEST_P(RowSelection, FlatAndAscendingRows) {
  const int64_t columns = on_host() ? 9000 : 40000;
  LogitRows rows(5, columns);
  for (int64_t v = 0; v < columns; ++v) {
    rows.at(0, v) = 3;
    rows.at(1, v) = static_cast<double>(v / 3);  // replaces its list all the time
    rows.at(2, v) = v % 7 == 0 ? -1e-40 : v % 2 == 0 ? 0.0 : -0.0;
    rows.at(3, v) = v < 100 || v >= columns - 10 ? 2 : 1;
    rows.at(4, v) = v == 7 || v == columns - 1 ? 1 : 0;
  }
  on_every_target([&] {
    for (const int64_t length : pick<int64_t>({1, 2, 4, 64, 130, 1000}, {1, 4, 64, 130}))
      expect_sorted(rows, length);
  });
}

TEST_P(RowSelection, ListsOfAnyLength) {
  // A GPU keeps short lists in shared memory, longer ones elsewhere. Some have more entries than a
  // part of a row, or than the row itself.
  const LogitRows rows = stepped(1, 36000, DType::f32, 0x1p-10, none);
  for (const int64_t length : {4096, 6000, 36000}) expect_sorted(rows, length);
  const LogitRows few = stepped(2, 300, DType::bf16, 0.5, 0);
  for (const int64_t length : {299, 300, 301, 8000}) expect_sorted(few, length, DType::bf16);
  const Selection top = expect_sorted(one_row({2, none, 3, none}), 6);
  EXPECT_EQ(top.values, (std::vector<float>{3, 2, -infinity, -infinity, -infinity, -infinity}));
  EXPECT_EQ(top.ids, (std::vector<int32_t>{2, 0, 1, 3, -1, -1}));
  EXPECT_EQ(top.last, std::vector<int32_t>{2});
}

TEST_P(RowSelection, NotANumberRanksAsTheLargest) {
  on_every_target([&] {
    LogitRows rows = random_logits(1, 5000, DType::f32);
    const auto nan = static_cast<double>(nan_value);
    for (const int64_t v : {4, 3000, 4999}) rows.at(0, v) = v == 3000 ? -nan : nan;
    rows.at(0, 77) = HUGE_VAL;
    const Selection top = select(rows, 8);
    EXPECT_EQ(std::vector(top.ids.begin(), top.ids.begin() + 4),
              (std::vector<int32_t>{4, 3000, 4999, 77}));
    for (size_t i = 0; i < 8; ++i) EXPECT_EQ(std::isnan(top.values[i]), i < 3) << i;
    EXPECT_TRUE(std::isnan(top.partials[0].sum));
    EXPECT_EQ(select(rows, 2).last[0], 0);
    std::fill(rows.values.begin() + 5, rows.values.end(), nan);
    EXPECT_EQ(select(rows, 3).ids, (std::vector<int32_t>{4, 5, 6}));
  });
}

TEST_P(RowSelection, PartialsAreThoseOfTheWholeRow) {
  const int64_t columns = on_host() ? 150000 : 70000;  // more than are taken at once
  for (const DType type : both_types) {
    LogitRows rows = random_logits(3, columns, DType::bf16, 3);
    for (int64_t v = 0; v < columns; ++v) {
      if (v < 35000) rows.at(1, v) = none;
      rows.at(2, v) = none;
    }
    rows.at(1, 34000) = 1;
    const Selection top = expect_sorted(rows, 40, type);
    for (int64_t r = 0; r < 2; ++r) {
      const SoftmaxPartial& m = top.partials[r];
      EXPECT_EQ(m.max, top.values[40 * r]);
      const TokenScore want = score_row_reference(rows.row(r), 60000, 2);
      const double x = (rows.at(r, 60000) - static_cast<double>(m.max)) / 2;
      const double log_sum = std::log(static_cast<double>(m.sum));
      EXPECT_NEAR(x - log_sum, want.logprob, logprob_tolerance() * logprob_scale(want.logprob));
      EXPECT_NEAR(log_sum - static_cast<double>(m.weighted) / static_cast<double>(m.sum),
                  want.entropy, logprob_tolerance() * entropy_scale(columns));
    }
    EXPECT_EQ(top.partials[2].sum, 0);
    EXPECT_EQ(top.partials[2].weighted, 0);
    EXPECT_EQ(top.partials[2].max, -infinity);
  }
}

TEST_P(RowSelection, EmptyShardsAndUnwantedResults) {
  const Selection nothing = select(Matrix(2, 3, DType::bf16), 0, 2);
  EXPECT_EQ(nothing.ids, (std::vector<int32_t>{-1, -1, -1, -1}));
  EXPECT_EQ(nothing.values[3], -infinity);
  EXPECT_EQ(nothing.last, (std::vector<int32_t>{0, 0}));
  EXPECT_EQ(nothing.partials[1].sum, 0);
  const DeviceMatrix logits(padded(one_row({1, 3, 2}), DType::bf16).ref(), stream());
  std::vector<float> values(2);
  kernels().top(logits.ref(), {3}, {values, {}, {}, 2}, {});
  EXPECT_EQ(values, (std::vector<float>{3, 2}));
  std::vector<SoftmaxPartial> partials(1);
  kernels().top(logits.ref(), {3}, {values, {}, {}, 2}, partials);
  EXPECT_EQ(partials[0].weighted, 0);
  EXPECT_GT(partials[0].sum, 1);
}

TEST_P(RowSelection, ThreadsAndRunsChangeNoBits) {
  const int64_t tokens = on_host() ? 37 : 3, columns = on_host() ? 5000 : 40000;
  const Matrix logits = padded(random_logits(tokens, columns, DType::bf16), DType::bf16);
  const Selection first = select(logits, columns, 30);
  EXPECT_TRUE(first == select(logits, columns, 30, 0, 4));
  std::vector<int64_t> one(1);  // another turn of a GPU's threads
  const DeviceMatrix zero(Matrix(1, 1, DType::f32).ref(), stream());
  EXPECT_ANY_THROW(kernels().find_ties(zero.ref(), 1, std::vector<TieQuery>{{0, 1, 1}}, 1, one));
  EXPECT_TRUE(first == select(logits, columns, 30, 0, 4));
}

TEST_P(RowSelection, TheFiveLargestOfGoldenRows) {
  const LogitRows rows = golden_logits();
  const Selection first = select(rows, 5), last = select(rows, 5, DType::bf16);
  EXPECT_EQ(std::vector(first.ids.begin(), first.ids.begin() + 5),
            (std::vector<int32_t>{57, 17, 34, 51, 11}));
  EXPECT_EQ(std::vector(first.values.begin(), first.values.begin() + 5),
            (std::vector<float>{6, 5.875F, 5.625F, 5.375F, 5.25F}));
  EXPECT_EQ(std::vector(last.ids.end() - 5, last.ids.end()),
            (std::vector<int32_t>{8, 25, 42, 2, 59}));
}

}  // namespace gyre::test::row_kernels
