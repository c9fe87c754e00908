// The largest logits of rows, sums by digits, counts and ties on the device: exactly as sorting and
// the host's passes have them.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "device_matrix.hpp"
#include "gpu_test.hpp"
#include "logprob_cases.hpp"
#include "logprobs/cuda_row_kernels.hpp"
#include "logprobs/reference.hpp"
#include "mpi_test.hpp"
#include "report/tolerance.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::DeviceMatrix;
using test::LogitRows;
using test::Matrix;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

struct Selection {
  std::vector<float> values;
  std::vector<int32_t> ids, last;
  std::vector<SoftmaxPartial> partials;

  Selection(int64_t rows, int64_t length)
      : values(static_cast<size_t>(rows * length), -77),
        ids(values.size(), -77),
        last(static_cast<size_t>(rows), -77),
        partials(last.size()) {}
  RowTop top(int64_t length) { return {values, ids, last, length}; }
};

class RowSelectionOnDevice : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) kernels_ = make_cuda_row_kernels(stream());
  }
  RowKernels& kernels() { return *kernels_; }

  Selection select(const Matrix& logits, int64_t columns, int64_t length, int64_t lead = 0) {
    const DeviceMatrix on_device(logits.ref(), stream(), lead);
    Selection result(logits.rows(), length);
    kernels_->top(on_device.ref(), {columns, 0.5F, true, 1}, result.top(length), result.partials);
    return result;
  }
  /// Compares with the definition, all columns sorted, and returns what was got.
  Selection expect_sorted(const LogitRows& rows, DType type, int64_t length, int64_t lead = 0) {
    const Matrix logits = rows.shard(
        partition_of(std::vector<int64_t>{rows.vocab_size + 2}, rows.vocab_size), 0, type);
    const Selection got = select(logits, rows.vocab_size, length, lead);
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const auto row = rows.row(t);
      std::vector<TopEntry> want = top_k_reference(row, length);
      want.resize(static_cast<size_t>(length), {-infinity, -1});
      int64_t wrong = 0;
      for (int64_t k = 0; k < length; ++k) {
        const auto at = static_cast<size_t>(t * length + k);
        const TopEntry& entry = want[static_cast<size_t>(k)];
        wrong += static_cast<double>(got.values[at]) != entry.value || got.ids[at] != entry.id;
      }
      EXPECT_EQ(wrong, 0) << "entries of row " << t << " of " << rows.vocab_size << " columns, "
                          << length << " wanted, " << name_of(type);
      EXPECT_EQ(got.last[static_cast<size_t>(t)],
                std::count(row.begin(), row.end(), want.back().value))
          << "row " << t << " of " << rows.vocab_size << " columns, " << length << " wanted";
    }
    return got;
  }

 private:
  std::unique_ptr<RowKernels> kernels_;
};

/// Random rows in steps of this size, and -inf below `least`.
LogitRows stepped(int64_t tokens, int64_t columns, DType type, double step, double least) {
  LogitRows rows = test::random_logits(tokens, columns, type, 2);
  for (double& z : rows.values) {
    if (step > 0) z = std::round(z / step) * step;
    if (z < least) z = -infinity;
  }
  return rows;
}

TEST_F(RowSelectionOnDevice, IsTheStartOfTheSortedRow) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const int64_t columns : {1, 9, 100, 2050, 5000})
      for (const int64_t length : {1, 2, 64, 700})
        for (const double step : {0.0, 0.25, 2.0})
          expect_sorted(stepped(1, columns, type, step, step == 2 ? 3 : -infinity), type, length,
                        columns % 3);
}

TEST_F(RowSelectionOnDevice, RowsOfSeveralPartsAndTheirPartials) {
  constexpr int64_t columns = 70000;
  LogitRows rows = stepped(3, columns, DType::bf16, 0, -infinity);
  for (int64_t v = 0; v < columns; ++v) {
    if (v < 35000) rows.at(1, v) = -infinity;
    rows.at(2, v) = -infinity;
  }
  rows.at(1, 34000) = 1;
  const Selection got = expect_sorted(rows, DType::bf16, 40);
  for (int64_t r = 0; r < 2; ++r) {
    const SoftmaxPartial& m = got.partials[static_cast<size_t>(r)];
    EXPECT_EQ(m.max, got.values[static_cast<size_t>(40 * r)]);
    const TokenScore want = score_row_reference(rows.row(r), 60000, 2);
    const double x = (rows.at(r, 60000) - static_cast<double>(m.max)) / 2;
    const double log_sum = std::log(static_cast<double>(m.sum));
    EXPECT_NEAR(x - log_sum, want.logprob, logprob_tolerance() * logprob_scale(want.logprob));
    EXPECT_NEAR(log_sum - static_cast<double>(m.weighted) / static_cast<double>(m.sum),
                want.entropy, logprob_tolerance() * entropy_scale(columns));
  }
  EXPECT_EQ(got.partials[2].sum, 0.0F);
  EXPECT_EQ(got.partials[2].max, static_cast<float>(-infinity));
}

TEST_F(RowSelectionOnDevice, FlatAndAscendingRows) {
  LogitRows rows(4, 40000);
  for (int64_t v = 0; v < 40000; ++v) {
    rows.at(0, v) = 3;
    rows.at(1, v) = static_cast<double>(v / 3);
    rows.at(2, v) = v % 2 == 0 ? 0.0 : -0.0;
    rows.at(3, v) = v < 100 || v >= 39990 ? 2 : 1;
  }
  for (const int64_t length : {1, 64, 130}) expect_sorted(rows, DType::f32, length);
}

TEST_F(RowSelectionOnDevice, ListsOfAnyLength) {
  // Kept in shared memory, and beyond it; of more than a part of a row, and than the row has.
  LogitRows rows = stepped(1, 36000, DType::f32, 0x1p-10, -infinity);
  for (const int64_t length : {4096, 6000, 36000}) expect_sorted(rows, DType::f32, length);
  const LogitRows few = stepped(2, 300, DType::bf16, 0.5, 0);
  for (const int64_t length : {299, 300, 301, 8000}) expect_sorted(few, DType::bf16, length);
}

TEST_F(RowSelectionOnDevice, NotANumberRanksAsTheLargest) {
  LogitRows rows = test::random_logits(1, 5000, DType::f32);
  for (const int64_t v : {4, 3000, 4999}) rows.at(0, v) = v == 3000 ? -not_a_number : not_a_number;
  rows.at(0, 77) = infinity;
  const Matrix logits = rows.shard(balanced_partition(5000, 1), 0, DType::f32);
  const Selection top = select(logits, 5000, 8);
  EXPECT_EQ(std::vector(top.ids.begin(), top.ids.begin() + 4),
            (std::vector<int32_t>{4, 3000, 4999, 77}));
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(std::isnan(top.values[i]), i < 3) << i;
  EXPECT_TRUE(std::isnan(top.partials[0].sum));
  const Selection nans = select(logits, 5000, 2);
  EXPECT_EQ(nans.last[0], 0);
  std::fill(rows.values.begin() + 5, rows.values.end(), not_a_number);
  EXPECT_EQ(select(rows.shard(balanced_partition(5000, 1), 0, DType::f32), 5000, 3).ids,
            (std::vector<int32_t>{4, 5, 6}));
}

TEST_F(RowSelectionOnDevice, EmptyShardsAndUnwantedResults) {
  const Selection nothing = select(Matrix(2, 3, DType::bf16), 0, 2);
  EXPECT_EQ(nothing.ids, (std::vector<int32_t>{-1, -1, -1, -1}));
  EXPECT_EQ(nothing.values[3], static_cast<float>(-infinity));
  EXPECT_EQ(nothing.last, (std::vector<int32_t>{0, 0}));
  EXPECT_EQ(nothing.partials[1].sum, 0);
  LogitRows rows(1, 3);
  rows.values = {1, 3, 2};
  const DeviceMatrix logits(rows.shard(balanced_partition(3, 1), 0, DType::bf16).ref(), stream());
  std::vector<float> values(2);
  kernels().top(logits.ref(), {3}, {values, {}, {}, 2}, {});
  EXPECT_EQ(values, (std::vector<float>{3, 2}));
  std::vector<SoftmaxPartial> partials(1);
  kernels().top(logits.ref(), {3}, {values, {}, {}, 2}, partials);
  EXPECT_EQ(partials[0].weighted, 0);
  EXPECT_GT(partials[0].sum, 1);
}

TEST_F(RowSelectionOnDevice, MassesByDigitsAddUpToTheHosts) {
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

TEST_F(RowSelectionOnDevice, EqualLogitsHaveEqualMasses) {
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

TEST_F(RowSelectionOnDevice, CountsAndTies) {
  for (const DType type : {DType::f32, DType::bf16}) {
    LogitRows rows = stepped(2, 20000, type, 0.5, -3);
    const Matrix logits = rows.shard(partition_of(std::vector<int64_t>{20003}, 20000), 0, type);
    const DeviceMatrix on_device(logits.ref(), stream(), 1);
    std::vector<ColumnQuery> queries;
    for (const int64_t begin : {0, 1, 7, 16383, 16384, 19999, 20000})
      for (const int64_t end : {0, 8, 16385, 20000})
        for (const double value : {0.5, -infinity, 77.0})
          if (begin <= end)
            queries.push_back({(begin + end) % 2, begin, end, static_cast<float>(value)});
    std::vector<ColumnCounts> got(queries.size(), {-7, -7}), want(queries.size());
    kernels().count_columns(on_device.ref(), queries, 1, got);
    cpu_row_kernels().count_columns(logits.ref(), queries, 1, want);
    for (size_t i = 0; i < queries.size(); ++i) {
      EXPECT_EQ(got[i].above, want[i].above) << i;
      EXPECT_EQ(got[i].equal, want[i].equal) << i;
    }
    std::vector<TieQuery> ties;
    for (const float value : {0.5F, 2.0F, -static_cast<float>(infinity)})
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

TEST_F(RowSelectionOnDevice, EveryRunHasTheSameBits) {
  const LogitRows rows = test::random_logits(3, 40000, DType::bf16);
  const Matrix logits = rows.shard(balanced_partition(40000, 1), 0, DType::bf16);
  const Selection first = select(logits, 40000, 30);
  for (int run = 0; run < 3; ++run) {
    if (run == 1) {  // another turn of threads
      std::vector<SoftmaxPartial> none;
      std::vector<int64_t> one(1);
      const DeviceMatrix zero(Matrix(1, 1, DType::f32).ref(), stream());
      EXPECT_ANY_THROW(
          kernels().find_ties(zero.ref(), 1, std::vector<TieQuery>{{0, 1, 1}}, 1, one));
    }
    const Selection again = select(logits, 40000, 30);
    EXPECT_EQ(first.values, again.values);
    EXPECT_EQ(first.ids, again.ids);
    EXPECT_EQ(first.last, again.last);
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_EQ(first.partials[r].sum, again.partials[r].sum);
      EXPECT_EQ(first.partials[r].weighted, again.partials[r].weighted);
    }
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
