#include "logprobs/row_statistics.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "logprob_cases.hpp"
#include "logprobs/reference.hpp"
#include "report/tolerance.hpp"
#include "simd_targets.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::LogitRows;
using test::Matrix;
using test::random_logits;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr double none = -HUGE_VAL;
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
constexpr std::array both_types = {DType::f32, DType::bf16};

/// A row as a matrix of one row and three columns of NaN, which are padding.
Matrix padded(const std::vector<double>& row, DType type) {
  Matrix matrix(1, std::ssize(row) + 3, type);
  for (size_t v = 0; v < row.size(); ++v) matrix.set(0, static_cast<int64_t>(v), row[v]);
  return matrix;
}

SoftmaxPartial partials(const std::vector<double>& row, DType type = DType::f32, float scale = 1,
                        bool weighted = true) {
  SoftmaxPartial out{nan_value, nan_value, nan_value};
  const Matrix matrix = padded(row, type);
  softmax_partials(matrix.ref(), {std::ssize(row), scale, weighted, 1}, {&out, 1});
  return out;
}

/// The scores that the partials of shards give, merged in double.
struct Merged {
  double max = none, sum = 0, weighted = 0, scale = 1;

  Merged(const std::vector<SoftmaxPartial>& shards, double scale_ = 1) : scale(scale_) {
    for (const SoftmaxPartial& m : shards) max = std::max(max, static_cast<double>(m.max));
    for (const SoftmaxPartial& m : shards) {
      if (m.max == -infinity) continue;
      const double d = (static_cast<double>(m.max) - max) * scale;
      sum += static_cast<double>(m.sum) * std::exp(d);
      weighted += (static_cast<double>(m.weighted) + d * static_cast<double>(m.sum)) * std::exp(d);
    }
  }
  double logprob(double z) const { return (z - max) * scale - std::log(sum); }
  double entropy() const { return std::log(sum) - weighted / sum; }
};

/// Errors over tolerances of the entropy and of every log-probability: the largest.
double worst_share(const std::vector<double>& row, const Merged& got) {
  const std::vector<double> want = log_softmax_reference(row, 1 / got.scale);
  double worst = 0;
  const auto share = [&](double x, double y, double scale) {
    const double error = x == y ? 0 : std::abs(x - y) / (logprob_tolerance() * scale);
    if (!(error <= worst)) worst = std::isnan(error) ? HUGE_VAL : error;
  };
  for (size_t v = 0; v < row.size(); ++v)
    share(got.logprob(row[v]), want[v], logprob_scale(want[v]));
  share(got.entropy(), score_row_reference(row, -1, 1 / got.scale).entropy,
        entropy_scale(std::ssize(row)));
  return worst;
}

void expect_matches_reference(const std::vector<double>& row, DType type, float scale = 1) {
  const SoftmaxPartial m = partials(row, type, scale);
  EXPECT_EQ(static_cast<double>(m.max), *std::max_element(row.begin(), row.end()));
  EXPECT_GE(m.sum, 1) << "no probability is above 1";
  EXPECT_LE(m.weighted, 0);
  EXPECT_LE(worst_share(row, Merged({m}, static_cast<double>(scale))), 1);
}

std::vector<double> random_row(int64_t columns, DType type, double size = 2, double offset = 0,
                               uint64_t seed = 1) {
  std::vector<double> row = random_logits(1, columns, type, size, seed).values;
  for (double& z : row) {
    const auto moved = static_cast<float>(z + offset);
    z = static_cast<double>(type == DType::bf16 ? to_float(to_bf16(moved)) : moved);
  }
  return row;
}

bool same_bits(const SoftmaxPartial& a, const SoftmaxPartial& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

TEST(RowStatistics, MatchesReferenceForAllLengths) {
  std::vector<int64_t> lengths = {1023, 1024, 1025, 4095,  4096,  4097,
                                  4127, 8192, 8201, 32768, 151936};
  for (int64_t columns = 1; columns <= 600; ++columns) lengths.push_back(columns);
  for (const DType type : both_types)
    for (const int64_t columns : lengths)
      for (const double size : {0.1, 3.0, 30.0}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, size " << size);
        expect_matches_reference(random_row(columns, type, size), type);
      }
}

TEST(RowStatistics, EveryInstructionSet) {
  test::on_every_simd_target([] {
    for (const DType type : both_types)
      for (const int64_t columns : {1, 7, 31, 32, 33, 64, 264, 3001, 9000})
        for (const double offset : {0.0, 1e4, -1e4}) {
          SCOPED_TRACE(testing::Message() << columns << " columns, offset " << offset);
          std::vector<double> row = random_row(columns, type, 5, offset);
          expect_matches_reference(row, type);
          if (columns == 1) continue;
          row[static_cast<size_t>(columns / 2)] = none;
          expect_matches_reference(row, type);
          row[static_cast<size_t>(columns / 3)] = HUGE_VAL;
          EXPECT_TRUE(std::isnan(partials(row, type).sum));
        }
  });
}

TEST(RowStatistics, SumsOfRows) {
  test::on_every_simd_target([] {
    for (const DType type : both_types)
      for (const int64_t columns : {0, 1, 15, 16, 33, 4095, 4097, 20001}) {
        test::LogitRows rows = random_logits(3, columns, type);
        for (int64_t v = 0; v < columns; ++v) rows.at(1, v) = v % 2 == 0 ? 1000 : -1000;  // cancels
        Matrix matrix(3, columns + 3, type);  // with padding of NaN
        for (int64_t t = 0; t < 3; ++t)
          for (int64_t v = 0; v < columns; ++v)
            matrix.set(t, v, rows.row(t)[static_cast<size_t>(v)]);
        std::vector<double> got(3), threaded(3);
        row_sums(std::as_const(matrix).ref(), columns, 1, got);
        row_sums(std::as_const(matrix).ref(), columns, 2, threaded);
        EXPECT_EQ(got, threaded);
        for (int64_t t = 0; t < 3; ++t) {
          double want = 0, sizes = 0;
          for (const double x : rows.row(t)) want += x, sizes += std::abs(x);
          EXPECT_NEAR(got[static_cast<size_t>(t)], want, 1e-6 * sizes) << columns;
        }
      }
  });
}

TEST(RowStatistics, NoColumns) {
  for (const DType type : both_types) {
    const SoftmaxPartial m = partials({}, type);
    EXPECT_TRUE(same_bits(m, {-infinity, 0, 0}));
  }
}

TEST(RowStatistics, RisingAndFallingRowsMoveTheMaximum) {
  for (const DType type : both_types)
    for (const double step : {0.05, 0.005, 0.0005}) {
      SCOPED_TRACE(step);
      std::vector<double> row(20000);
      for (size_t i = 0; i < row.size(); ++i) {
        const float z = static_cast<float>(step * static_cast<double>(i) - 100);
        row[i] = static_cast<double>(type == DType::bf16 ? to_float(to_bf16(z)) : z);
      }
      expect_matches_reference(row, type);
      std::reverse(row.begin(), row.end());
      expect_matches_reference(row, type);
    }
}

TEST(RowStatistics, WhatIsBehindAHighLogitStillCounts) {
  // The many have 2e-5 of the mass and 5e-4 of the entropy, ten times the tolerance.
  for (const DType type : both_types) {
    std::vector<double> row(200000, 0);
    row.push_back(23);
    expect_matches_reference(row, type);
  }
}

TEST(RowStatistics, OneLogitFarAboveOrBelowTheOthers) {
  for (const DType type : both_types)
    for (const size_t at : {0, 40, 4095, 4096, 8999})
      for (const double z : {40.0, 80.0, 130.0, 1000.0, 3e38, -130.0, -1000.0, -3e38}) {
        SCOPED_TRACE(testing::Message() << z << " at " << at);
        std::vector<double> row = random_row(9000, type);
        const auto narrow = static_cast<float>(z);
        row[at] = static_cast<double>(type == DType::bf16 ? to_float(to_bf16(narrow)) : narrow);
        expect_matches_reference(row, type);
      }
}

TEST(RowStatistics, NegativeRows) {
  for (const DType type : both_types)
    for (const int64_t columns : {5, 64, 1000, 5000}) {
      std::vector<double> row = random_row(columns, type, 2, -60);
      expect_matches_reference(row, type);
      std::fill(row.begin() + 1, row.end(), -1e-30);
      row[0] = -0.0;
      EXPECT_EQ(partials(row, type).max, 0);
    }
}

TEST(RowStatistics, LargeCommonOffset) {
  for (const DType type : both_types)
    for (const double offset : {100.0, 1e3, 1e4, -1e4, 4.6e4, -4.6e4, 1e6, 1e30, -1e30}) {
      SCOPED_TRACE(offset);
      expect_matches_reference(random_row(777, type, 1, offset), type);
      expect_matches_reference(random_row(5000, type, 1, offset), type);
    }
}

TEST(RowStatistics, Temperature) {
  for (const DType type : both_types)
    for (const float scale : {0.1F, 0.7F, 1 / 0.7F, 10.0F, 100.0F, 1e-3F, 1e4F})
      for (const double offset : {0.0, 50.0, -1e4}) {
        SCOPED_TRACE(testing::Message() << "scale " << scale << ", offset " << offset);
        expect_matches_reference(random_row(4500, type, 2, offset), type, scale);
      }
}

TEST(RowStatistics, InfinitelyUnlikelyColumns) {
  for (const DType type : both_types)
    for (const size_t front : {1, 31, 2000, 4096, 4100, 8192, 9998}) {
      SCOPED_TRACE(front);
      std::vector<double> row = random_row(10000, type, 2, -3);
      std::fill_n(row.begin(), front, none);
      row[9999] = 1.5;
      if (front < 9000) row[9500] = none;
      expect_matches_reference(row, type);
      std::reverse(row.begin(), row.end());
      expect_matches_reference(row, type);
    }
}

TEST(RowStatistics, NothingButInfinitelyUnlikelyColumns) {
  for (const DType type : both_types)
    for (const int64_t columns : {1, 40, 5000})
      EXPECT_TRUE(same_bits(partials(std::vector<double>(static_cast<size_t>(columns), none), type),
                            {-infinity, 0, 0}));
}

TEST(RowStatistics, NotANumberIsNotHidden) {
  const auto nan = static_cast<double>(nan_value);
  test::on_every_simd_target([&] {
    for (const DType type : both_types)
      for (const double bad : {nan, std::copysign(nan, -1), HUGE_VAL})
        for (const double others : {2.0, -5.0, none})
          for (const size_t at : {0, 5, 40, 4095, 4096, 5099}) {
            SCOPED_TRACE(testing::Message() << bad << " at " << at << " among " << others);
            std::vector<double> row(5100, others);
            row[at] = bad;
            for (const bool weighted : {false, true}) {
              const SoftmaxPartial m = partials(row, type, 1, weighted);
              EXPECT_TRUE(std::isnan(m.sum));
              EXPECT_NE(m.max, -infinity) << "would look like a shard without columns";
              EXPECT_EQ(std::isnan(m.weighted), weighted);
            }
          }
    EXPECT_TRUE(std::isnan(partials(std::vector<double>(3, nan)).sum));
  });
}

TEST(RowStatistics, PaddingAndStrideAndThreads) {
  for (const DType type : both_types) {
    const LogitRows rows = random_logits(700, 1003, type);
    const VocabPartition vocab = partition_of(std::vector<int64_t>{1010}, 1003);
    const Matrix matrix = rows.shard(vocab, 0, type);  // NaN behind each row
    std::vector<SoftmaxPartial> one(700), two(700);
    softmax_partials(matrix.ref(), {1003, 1, true, 1}, one);
    softmax_partials(matrix.ref(), {1003, 1, true, 2}, two);
    for (int64_t t = 0; t < 700; ++t) {
      const auto at = static_cast<size_t>(t);
      EXPECT_TRUE(same_bits(one[at], two[at]));
      const std::vector<double> row(rows.row(t).begin(), rows.row(t).end());
      ASSERT_TRUE(same_bits(one[at], partials(row, type))) << "row " << t;
    }
  }
}

TEST(RowStatistics, ValuesDoNotDependOnWhetherTheEntropyIsWanted) {
  for (const DType type : both_types)
    for (const int64_t columns : {3, 333, 10000})
      for (const bool masked : {false, true}) {
        std::vector<double> row = random_row(columns, type);
        if (masked) row[1] = none;
        const SoftmaxPartial with = partials(row, type, 0.8F),
                             without = partials(row, type, 0.8F, false);
        EXPECT_EQ(with.max, without.max);
        EXPECT_EQ(with.sum, without.sum);
        EXPECT_LT(with.weighted, 0);
        EXPECT_EQ(without.weighted, 0);
      }
}

TEST(RowStatistics, PartsMergeToTheWholeRow) {
  EXPECT_TRUE(rc::check("partials of parts", [] {
    const DType type = both_types.at(*rc::gen::inRange<size_t>(0, 2));
    const auto columns = *rc::gen::inRange<int64_t>(1, 6000);
    const auto cut = *rc::gen::inRange<int64_t>(0, columns + 1);
    const auto size = *rc::gen::element(0.1, 2.0, 50.0);
    const auto scale = *rc::gen::element(0.5F, 1.0F, 3.0F);
    std::vector<double> row = random_row(columns, type, size, *rc::gen::element(0.0, 30.0, -5e3),
                                         *rc::gen::arbitrary<uint64_t>());
    const auto masked = *rc::gen::inRange<int64_t>(0, columns);
    std::fill_n(row.begin(), masked, none);
    const auto part = [&](int64_t begin, int64_t end) {
      return partials({row.begin() + begin, row.begin() + end}, type, scale);
    };
    const SoftmaxPartial a = part(0, cut), b = part(cut, columns);
    RC_ASSERT(worst_share(row, Merged({a, b}, static_cast<double>(scale))) <= 1);
  }));
}

TEST(RowStatistics, GoldenRows) {
  constexpr double lse[] = {7.748163688, 7.575016135, 7.792737857, 7.783393937,
                            7.837148456, 7.651064173, 7.784641104, 7.720435309};
  constexpr double logprob[] = {-3.123163688,  -7.825016135, -12.917737857, -5.658393937,
                                -10.587148456, -5.776064173, -10.784641104, -3.470435309};
  constexpr double entropy[] = {2.643832576, 2.637051615, 2.653252468, 2.676617565,
                                2.655697487, 2.672440759, 2.723055265, 2.654009122};
  const LogitRows rows = test::golden_logits();
  const std::vector<int32_t> targets = test::golden_targets();
  for (const DType type : both_types)
    for (int64_t s = 0; s < 8; ++s) {
      const auto at = static_cast<size_t>(s);
      const std::vector<double> row(rows.row(s).begin(), rows.row(s).end());
      const Merged got({partials(row, type)});
      const double z = row[static_cast<size_t>(targets[at])];
      EXPECT_NEAR(got.max + std::log(got.sum), lse[s], logprob_tolerance() * lse[s]);
      EXPECT_NEAR(got.logprob(z), logprob[s], logprob_tolerance() * logprob_scale(logprob[s]));
      EXPECT_NEAR(got.entropy(), entropy[s], logprob_tolerance() * entropy_scale(64));
    }
}

TEST(RowStatistics, GoldenSpecialRows) {
  const double tolerance = logprob_tolerance();
  const Merged ramp({partials({0, 1, 2, 3, 4})});
  EXPECT_NEAR(ramp.logprob(0), -4.451914396, tolerance * 5);
  EXPECT_NEAR(ramp.entropy(), 0.999972828, tolerance);
  const Merged masked({partials({0, 1, none})});
  EXPECT_NEAR(masked.logprob(1), -0.313261688, tolerance);
  EXPECT_EQ(masked.logprob(none), none);
  EXPECT_NEAR(masked.entropy(), 0.582203109, tolerance);
  const Merged shifted({partials({1e4, 1e4, 0})});
  EXPECT_NEAR(shifted.logprob(1e4), -0.693147181, tolerance);
  EXPECT_NEAR(shifted.logprob(0), -10000.693147, 1e4 * tolerance);
  const Merged uniform({partials(std::vector<double>(64, 2.5))});
  EXPECT_NEAR(uniform.logprob(2.5), -4.158883083, 5 * tolerance);
  EXPECT_NEAR(uniform.entropy(), 4.158883083, 5 * tolerance);
}

// Cross partials.

CrossPartial cross_partials(const std::vector<double>& student, DType student_type,
                            const std::vector<double>& teacher, DType teacher_type) {
  CrossPartial out;
  const Matrix s = padded(student, student_type), t = padded(teacher, teacher_type);
  softmax_cross_partials(s.ref(), t.ref(), std::ssize(student), 1, {&out, 1});
  return out;
}
double cross_entropy(const CrossPartial& m) {
  return std::log(static_cast<double>(m.student_sum)) -
         static_cast<double>(m.cross) / static_cast<double>(m.teacher_sum);
}

void expect_cross_entropy(const std::vector<double>& student, DType student_type,
                          const std::vector<double>& teacher, DType teacher_type) {
  const CrossPartial m = cross_partials(student, student_type, teacher, teacher_type);
  EXPECT_EQ(static_cast<double>(m.student_max), *std::max_element(student.begin(), student.end()));
  EXPECT_EQ(static_cast<double>(m.teacher_max), *std::max_element(teacher.begin(), teacher.end()));
  const double want = soft_cross_entropy_reference(student, teacher), got = cross_entropy(m);
  if (std::isinf(want))
    EXPECT_EQ(got, want);
  else
    EXPECT_NEAR(got, want, logprob_tolerance() * logprob_scale(want));
  // Each sum alone.
  EXPECT_LE(worst_share(student, Merged({{m.student_max, m.student_sum,
                                          partials(student, student_type).weighted}})),
            1);
  EXPECT_LE(worst_share(teacher, Merged({{m.teacher_max, m.teacher_sum,
                                          partials(teacher, teacher_type).weighted}})),
            1);
}

TEST(SoftmaxCrossPartials, MatchReferenceForAllTypes) {
  for (const DType s : both_types)
    for (const DType t : both_types)
      for (const int64_t columns : {1, 2, 15, 31, 32, 33, 64, 500, 1023, 1024, 1025, 5000, 40000})
        for (const double offset : {0.0, 1e4}) {
          SCOPED_TRACE(testing::Message() << columns << " columns, offset " << offset);
          expect_cross_entropy(random_row(columns, s, 3, offset), s,
                               random_row(columns, t, 3, -offset, 7), t);
        }
}

TEST(SoftmaxCrossPartials, EveryInstructionSet) {
  test::on_every_simd_target([] {
    for (const DType s : both_types)
      for (const DType t : both_types)
        for (const int64_t columns : {3, 47, 2050})
          expect_cross_entropy(random_row(columns, s), s, random_row(columns, t, 2, 0, 7), t);
  });
}

TEST(SoftmaxCrossPartials, RisingRows) {
  std::vector<double> up(9000), down(9000);
  for (size_t i = 0; i < up.size(); ++i) up[i] = down[8999 - i] = 0.0625 * static_cast<double>(i);
  for (const auto& [s, t] : {std::pair{up, down}, std::pair{down, up}, std::pair{up, up}})
    expect_cross_entropy(s, DType::f32, t, DType::f32);
}

TEST(SoftmaxCrossPartials, InfinitelyUnlikelyColumns) {
  for (const DType type : both_types) {
    const std::vector<double> s = random_row(3000, type), t = random_row(3000, type, 2, 0, 7);
    for (const size_t begin : {0, 10, 1024, 2990})
      for (const size_t count : {1, 10}) {
        SCOPED_TRACE(testing::Message() << count << " from " << begin);
        std::vector<double> masked_s = s, masked_t = t;
        std::fill_n(masked_s.begin() + static_cast<ptrdiff_t>(begin), count, none);
        std::fill_n(masked_t.begin() + static_cast<ptrdiff_t>(begin), count, none);
        expect_cross_entropy(masked_s, type, masked_t, type);
        expect_cross_entropy(s, type, masked_t, type);
        expect_cross_entropy(masked_s, type, t, type);  // infinite
        masked_t = t;
        masked_t[begin] = -500;  // as good as 0, but not 0
        expect_cross_entropy(masked_s, type, masked_t, type);
      }
    std::vector<double> late_s = s, late_t = t;
    std::fill_n(late_s.begin(), 2000, none);
    std::fill_n(late_t.begin(), 2100, none);
    expect_cross_entropy(late_s, type, late_t, type);
    expect_cross_entropy(s, type, late_t, type);
  }
}

TEST(SoftmaxCrossPartials, ShardsOfNothing) {
  const std::vector<double> nothing(40, none), some(40, 1.0);
  const CrossPartial neither = cross_partials(nothing, DType::f32, nothing, DType::f32);
  EXPECT_EQ(neither.student_max, -infinity);
  EXPECT_EQ(neither.teacher_max, -infinity);
  EXPECT_EQ(neither.student_sum + neither.teacher_sum + neither.cross, 0);
  EXPECT_EQ(cross_partials(nothing, DType::f32, some, DType::f32).cross, -infinity);
  const CrossPartial no_teacher = cross_partials(some, DType::f32, nothing, DType::f32);
  EXPECT_EQ(no_teacher.student_sum, 40);
  EXPECT_EQ(no_teacher.cross, 0);
}

TEST(SoftmaxCrossPartials, NotANumberIsNotHidden) {
  for (const double bad : {static_cast<double>(nan_value), HUGE_VAL})
    for (const size_t at : {0, 33, 1500}) {
      std::vector<double> row(1600, 1.0);
      const std::vector<double> good = row;
      row[at] = bad;
      EXPECT_TRUE(std::isnan(cross_entropy(cross_partials(row, DType::f32, good, DType::bf16))));
      EXPECT_TRUE(std::isnan(cross_entropy(cross_partials(good, DType::f32, row, DType::bf16))));
    }
}

TEST(SoftmaxCrossPartials, ThreadsAndStrideAndPadding) {
  const LogitRows s = random_logits(600, 1003, DType::f32),
                  t = random_logits(600, 1003, DType::f32, 2, 7);
  const VocabPartition vocab = partition_of(std::vector<int64_t>{1010}, 1003);
  const Matrix student = s.shard(vocab, 0, DType::f32), teacher = t.shard(vocab, 0, DType::bf16);
  std::vector<CrossPartial> one(600), two(600);
  softmax_cross_partials(student.ref(), teacher.ref(), 1003, 1, one);
  softmax_cross_partials(student.ref(), teacher.ref(), 1003, 2, two);
  EXPECT_EQ(0, std::memcmp(one.data(), two.data(), one.size() * sizeof(CrossPartial)));
  for (const CrossPartial& m : one) ASSERT_FALSE(std::isnan(m.cross));
}

TEST(SoftmaxCrossPartials, GoldenRows) {
  constexpr double value[] = {8.344218829, 7.786752955, 7.138260753, 7.456781096,
                              7.809284165, 9.052951627, 7.284411675, 6.842543003};
  const LogitRows a = test::golden_logits(), teacher = test::golden_teacher();
  for (int64_t s = 0; s < 8; ++s) {
    const std::vector<double> student_row(a.row(s).begin(), a.row(s).end());
    const std::vector<double> teacher_row(teacher.row(s).begin(), teacher.row(s).end());
    for (const DType type : both_types)
      EXPECT_NEAR(cross_entropy(cross_partials(student_row, type, teacher_row, DType::bf16)),
                  value[s], logprob_tolerance() * value[s]);
  }
  EXPECT_NEAR(
      cross_entropy(cross_partials({0, 1, 2, 3, 4}, DType::f32, {4, 3, 2, 1, 0}, DType::f32)),
      3.903855964, 4 * logprob_tolerance());
}

}  // namespace GYRE_FILE
}  // namespace gyre
