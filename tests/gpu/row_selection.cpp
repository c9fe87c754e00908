// The largest logits of rows on the device: the suite of every backend; sums by digits, counts and
// ties are exactly those of the host.

#include "row_selection_cases.hpp"

namespace gyre::test::row_kernels {

GYRE_RUN_ON(device, RowSelection);

class CudaSelection : public RowSelection {};
GYRE_RUN_ON(device, CudaSelection);

TEST_P(CudaSelection, MassesByDigitsAddUpToTheHosts) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const bool all : {false, true}) {
      LogitRows rows = stepped(3, 20001, type, 0.125, -8);
      rows.at(1, 5) = -0.0;
      const Matrix logits = rows.shard(balanced_partition(20001, 1), 0, type);
      const DeviceMatrix on_device(logits.ref(), stream(), 1);
      const int bits = fraction_bits_for(20001), shift = type == DType::f32 ? 16 : 0;
      const std::vector<MassRow> queries = {
          {2, {8, 0.5F, bits, key_of(0.5F, type), shift, all}},
          {0, {9, 1, bits, key_of(-4, type), type == DType::f32 ? 24 : 8, all}},
          {2, {8, 0.5F, bits, key_of(1, type), type == DType::f32 ? 8 : 0, all}}};
      std::vector<int64_t> got(3 * digit_sums, -7), want(3 * digit_sums), again(3 * digit_sums);
      kernels().masses(on_device.ref(), 20001, queries, 1, got);
      kernels().masses(on_device.ref(), 20001, queries, 1, again);
      cpu_row_kernels().masses(logits.ref(), 20001, queries, 1, want);
      EXPECT_EQ(got, again);
      for (size_t i = 0; i < got.size(); ++i) {
        const auto bucket = static_cast<int64_t>(i) % digit_sums;
        if (!all && bucket >= digit_buckets) {
          EXPECT_EQ(got[i], 0);
          continue;
        }
        // Each term has the error of an exponential, of one rounding at its size.
        EXPECT_NEAR(static_cast<double>(got[i]), static_cast<double>(want[i]),
                    tolerance_for(DType::f32, row_roundings) * static_cast<double>(want[i]) + 20001)
            << i;
        EXPECT_EQ(got[i] == 0, want[i] == 0) << i;
      }
    }
}

TEST_P(CudaSelection, EqualLogitsHaveEqualMasses) {
  // What a threshold's columns weigh is divided by how many they are, over ranks.
  LogitRows rows(1, 1000);
  for (int64_t v = 0; v < 1000; ++v) rows.at(0, v) = v % 7 == 0 ? -1.375 : 0.5;
  const Matrix logits = rows.shard(balanced_partition(1000, 1), 0, DType::f32);
  const int bits = fraction_bits_for(1000);
  const std::vector<MassRow> query = {{0, {0.5F, 1, bits, key_of(-1.375F, DType::f32), 0, false}}};
  std::vector<int64_t> one(digit_sums), all(digit_sums);
  kernels().masses(DeviceMatrix(logits.ref(), stream(), 1).ref(), 1, query, 1, one);
  kernels().masses(DeviceMatrix(logits.ref(), stream(), 2).ref(), 1000, query, 1, all);
  EXPECT_GT(one[0], 0);
  EXPECT_EQ(all[0], 143 * one[0]);
}

TEST_P(CudaSelection, CountsAndTies) {
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = stepped(2, 20000, type, 0.5, -3);
    const Matrix logits = padded(rows, type);
    const DeviceMatrix on_device(logits.ref(), stream(), 1);
    std::vector<ColumnQuery> queries;
    for (const int64_t begin : {0, 1, 7, 16383, 16384, 19999, 20000})
      for (const int64_t end : {0, 8, 16385, 20000})
        for (const float value : {0.5F, -infinity, 77.0F})
          if (begin <= end) queries.push_back({(begin + end) % 2, begin, end, value});
    std::vector<ColumnCounts> got(queries.size(), {-7, -7}), want(queries.size());
    kernels().count_columns(on_device.ref(), queries, 1, got);
    cpu_row_kernels().count_columns(logits.ref(), queries, 1, want);
    for (size_t i = 0; i < queries.size(); ++i) {
      EXPECT_EQ(got[i].above, want[i].above) << i;
      EXPECT_EQ(got[i].equal, want[i].equal) << i;
    }
    std::vector<TieQuery> ties;
    for (const float value : {0.5F, 2.0F, -infinity})
      for (const int64_t row : {0, 1}) {
        const int64_t count =
            std::count(rows.row(row).begin(), rows.row(row).end(), static_cast<double>(value));
        for (const int64_t n : {int64_t{1}, int64_t{2}, count / 2, count - 1, count})
          ties.push_back({row, value, n});
      }
    std::vector<int64_t> found(ties.size(), -7), expected(ties.size());
    kernels().find_ties(on_device.ref(), 20000, ties, 1, found);
    cpu_row_kernels().find_ties(logits.ref(), 20000, ties, 1, expected);
    EXPECT_EQ(found, expected);
    const std::vector<TieQuery> impossible = {{0, 77, 1}};
    EXPECT_ANY_THROW(
        kernels().find_ties(on_device.ref(), 20000, impossible, 1, std::span(found).first(1)));
  }
}

}  // namespace gyre::test::row_kernels
