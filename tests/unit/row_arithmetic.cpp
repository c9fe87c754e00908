// What the suites of row kernels do not show of the arithmetic of the device's row passes.

#include "logprobs/rows/row_arithmetic.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace gyre {
namespace GYRE_FILE {

constexpr float minus_infinity = -HUGE_VALF;

TEST(RowArithmetic, EntriesOrderAsListsDo) {
  const float values[] = {NAN, HUGE_VALF, 2, 1e-40F, 0, -1e-40F, -2, minus_infinity};
  uint64_t before = ~uint64_t{0};
  for (const float value : values)
    for (const int64_t column : {0, 1, 5000000}) {
      const uint64_t entry = rows::entry_of(value, column);
      EXPECT_LT(entry, before) << value << ' ' << column;
      EXPECT_GT(entry, 0U);
      before = entry;
      EXPECT_EQ(rows::column_of_entry(entry), column);
      const float back = rows::value_of_order(rows::order_of_entry(entry));
      EXPECT_TRUE(back == value || (std::isnan(back) && std::isnan(value)));
    }
  EXPECT_EQ(rows::entry_of(-0.0F, 3), rows::entry_of(0.0F, 3));
}

TEST(RowArithmetic, WhatARowGets) {
  using rows::RowKind;
  const RowNormalizer good{1, 2}, bad{NAN, 2}, empty{minus_infinity, minus_infinity};
  EXPECT_EQ(rows::kind_of(good, true, true), RowKind::values);
  EXPECT_EQ(rows::kind_of(good, false, true), RowKind::zeros);  // and what ids add
  EXPECT_EQ(rows::kind_of(bad, false, true), RowKind::nans);
  EXPECT_EQ(rows::kind_of(empty, true, true), RowKind::nans);
  EXPECT_EQ(rows::kind_of(bad, false, false), RowKind::zeros);
  EXPECT_EQ(rows::column_of(105, 100, 10), 5);
  EXPECT_EQ(rows::column_of(110, 100, 10), -1);
  EXPECT_EQ(rows::column_of(99, 100, 10), -1);
  EXPECT_EQ(rows::column_of(-1, -5, 10), -1);
  EXPECT_EQ(rows::past_alignment(reinterpret_cast<const void*>(64 + 6), 2, 8), 3);
}

}  // namespace GYRE_FILE
}  // namespace gyre
