#pragma once
// Statistics of rows on every backend, against references in double precision.

#include <rapidcheck.h>

#include <algorithm>
#include <cstring>

#include "row_kernel_test.hpp"

namespace gyre::test::row_kernels {

inline bool same_bits(const SoftmaxPartial& a, const SoftmaxPartial& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

inline double cross_entropy(const CrossPartial& m) {
  return std::log(static_cast<double>(m.student_sum)) -
         static_cast<double>(m.cross) / sum_unit / static_cast<double>(m.teacher_sum);
}

class RowStatistics : public RowKernelTest {
 protected:
  std::vector<SoftmaxPartial> partials(const Matrix& logits, const RowScan& scan,
                                       int64_t lead = 0) {
    const DeviceMatrix there(logits.ref(), stream(), lead);
    std::vector<SoftmaxPartial> out(logits.rows(), {nan_value, -7, -7});
    kernels().partials(there.ref(), scan, out);
    return out;
  }
  SoftmaxPartial partial(const std::vector<double>& row, DType type = DType::f32, float scale = 1,
                         bool weighted = true, int64_t lead = 0) {
    return partials(padded(one_row(row), type), {std::ssize(row), scale, weighted, 1}, lead)[0];
  }
  void expect_reference(const std::vector<double>& row, DType type, float scale = 1,
                        int64_t lead = 0) {
    const SoftmaxPartial m = partial(row, type, scale, true, lead);
    EXPECT_EQ(static_cast<double>(m.max), *std::max_element(row.begin(), row.end()));
    EXPECT_GE(m.sum, 1) << "no probability is above 1";
    EXPECT_LE(m.weighted, 0);
    EXPECT_LE(worst_share(row, Merged({m}, static_cast<double>(scale))), 1);
  }
  void expect_reference_either_way(std::vector<double> row, DType type) {
    expect_reference(row, type);
    std::reverse(row.begin(), row.end());
    expect_reference(row, type, 1, 3);
  }

  CrossPartial cross(const std::vector<double>& student, DType student_type,
                     const std::vector<double>& teacher, DType teacher_type, int64_t lead = 0) {
    const DeviceMatrix s(padded(one_row(student), student_type).ref(), stream(), lead),
        t(padded(one_row(teacher), teacher_type).ref(), stream());
    CrossPartial out;
    kernels().cross_partials(s.ref(), t.ref(), std::ssize(student), 1, {&out, 1});
    return out;
  }
  void expect_cross_entropy(const std::vector<double>& student, DType student_type,
                            const std::vector<double>& teacher, DType teacher_type,
                            int64_t lead = 0) {
    const CrossPartial m = cross(student, student_type, teacher, teacher_type, lead);
    EXPECT_EQ(static_cast<double>(m.student_max),
              *std::max_element(student.begin(), student.end()));
    EXPECT_EQ(static_cast<double>(m.teacher_max),
              *std::max_element(teacher.begin(), teacher.end()));
    const double want = soft_cross_entropy_reference(student, teacher);
    EXPECT_LE(share_of(cross_entropy(m), want,
                       std::isinf(want) ? 0 : logprob_tolerance() * logprob_scale(want)),
              1)
        << cross_entropy(m) << ", expected " << want;
    // Each sum alone.
    const auto share = [&](const std::vector<double>& row, DType type, float max, float sum) {
      return worst_share(row, Merged({{max, sum, partial(row, type).weighted}}));
    };
    EXPECT_LE(share(student, student_type, m.student_max, m.student_sum), 1);
    EXPECT_LE(share(teacher, teacher_type, m.teacher_max, m.teacher_sum), 1);
  }
};

TEST_P(RowStatistics, MatchTheReferenceForAnyLengthAndAddress) {
  std::vector<int64_t> lengths = {1, 3, 7, 8, 9, 63, 255, 1025, 2049, 5000};
  if (on_host()) {
    for (int64_t columns = 1; columns <= 600; ++columns) lengths.push_back(columns);
    lengths.insert(lengths.end(), {1023, 1024, 4095, 4096, 4097, 4127, 8192, 8201, 32768, 151936});
  }
  for (const DType type : both_types)
    for (const int64_t columns : lengths)
      for (const double size : {0.1, 3.0, 30.0}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, size " << size);
        const int64_t lead = columns % 2 == 0 ? 0 : size > 1 ? 5 : 1;
        expect_reference(random_row(columns, type, size), type, size == 3 ? 0.75F : 1, lead);
      }
}

TEST_P(RowStatistics, EveryInstructionSet) {
  on_every_target([&] {
    for (const DType type : both_types)
      for (const int64_t columns : {1, 7, 31, 32, 33, 64, 264, 3001, 9000})
        for (const double offset : {0.0, 1e4, -1e4}) {
          SCOPED_TRACE(testing::Message() << columns << " columns, offset " << offset);
          std::vector<double> row = random_row(columns, type, 5, offset);
          expect_reference(row, type);
          if (columns == 1) continue;
          row[columns / 2] = none;
          expect_reference(row, type, 1, 1);
          row[columns / 3] = HUGE_VAL;
          EXPECT_TRUE(std::isnan(partial(row, type).sum));
        }
  });
}

TEST_P(RowStatistics, SumsOfRows) {
  on_every_target([&] {
    for (const DType type : both_types)
      for (const int64_t columns : {0, 1, 15, 16, 33, 4095, 4097, 20001}) {
        LogitRows rows = random_logits(3, columns, DType::bf16);
        for (int64_t v = 0; v < columns; ++v) rows.at(1, v) = v % 2 == 0 ? 1000 : -1000;  // cancels
        const DeviceMatrix values(padded(rows, type).ref(), stream(), 1);
        std::vector<double> got(3), threaded(3);
        kernels().sums(values.ref(), columns, 1, got);
        kernels().sums(values.ref(), columns, 2, threaded);
        EXPECT_EQ(got, threaded);
        for (int64_t t = 0; t < 3; ++t) {
          double want = 0, sizes = 0;
          for (const double x : rows.row(t)) want += x, sizes += std::abs(x);
          // A GPU adds in double precision: sums of 8 bits each are exact.
          EXPECT_NEAR(got[t], want, on_host() ? 1e-6 * sizes : 0) << columns;
        }
      }
  });
}

TEST_P(RowStatistics, EmptyShardsAndNoRows) {
  for (const DType type : both_types) EXPECT_TRUE(same_bits(partial({}, type), {-infinity, 0, 0}));
  EXPECT_TRUE(partials(Matrix(0, 5, DType::f32), {5, 1, true, 1}).empty());
  std::vector<SoftmaxPartial> out(2);
  kernels().partials({nullptr, DType::bf16, 2, 0, 0}, {0, 1, false, 1}, out);
  EXPECT_EQ(out[1].sum, 0);
}

TEST_P(RowStatistics, RisingAndFallingRowsMoveTheMaximum) {
  for (const DType type : both_types)
    for (const double step : {0.05, 0.005, 0.0005}) {
      SCOPED_TRACE(step);
      std::vector<double> row(40000);
      for (size_t i = 0; i < row.size(); ++i)
        row[i] = stored(step * static_cast<double>(i) - 100, type);
      expect_reference_either_way(row, type);
    }
}

TEST_P(RowStatistics, WhatIsBehindAHighLogitStillCounts) {
  // The many have 2e-5 of the mass and 5e-4 of the entropy, ten times the tolerance.
  for (const DType type : both_types) {
    std::vector<double> row(200000, 0);
    row.push_back(23);
    expect_reference(row, type);
  }
}

TEST_P(RowStatistics, OneLogitFarAboveOrBelowTheOthers) {
  for (const DType type : both_types)
    for (const size_t at : pick<size_t>({0, 40, 4095, 4096, 8999}, {40, 8999}))
      for (const double z : {40.0, 80.0, 130.0, 1000.0, 3e38, -130.0, -1000.0, -3e38}) {
        SCOPED_TRACE(testing::Message() << z << " at " << at);
        std::vector<double> row = random_row(9000, type);
        row[at] = stored(z, type);
        expect_reference(row, type);
      }
}

TEST_P(RowStatistics, RowsWithoutOrdinaryNumbers) {
  std::vector<double> masked(40000, lowest), far(700, -3e38);
  for (size_t v = 0; v < masked.size(); v += 3) masked[v] = 1;
  far[3] = 3e38;
  for (const DType type : both_types) {
    for (const double value : {type == DType::f32 ? lowest : -3.3e38, 3e38, -2.5, -1e-40})
      expect_reference(std::vector<double>(700, stored(value, type)), type, 0.5F);
    expect_reference(masked, DType::f32);
    far[0] = stored(-3e38, type);
    std::fill(far.begin(), far.end(), far[0]);
    far[3] = stored(3e38, type);
    expect_reference(far, type, 0.5F);
    for (const int64_t columns : {5, 64, 1000, 5000}) {
      expect_reference(random_row(columns, type, 2, -60), type);
      std::vector<double> row(columns, -1e-30);
      row[0] = -0.0;
      EXPECT_EQ(partial(row, type).max, 0);
    }
    for (const int64_t columns : {1, 40, 5000})
      EXPECT_TRUE(same_bits(partial(std::vector<double>(columns, none), type), {-infinity, 0, 0}));
  }
}

TEST_P(RowStatistics, CommonOffsetsAndTemperatures) {
  for (const DType type : both_types) {
    for (const double offset : {100.0, 1e3, 1e4, -1e4, 4.6e4, -4.6e4, 1e6, 1e30, -1e30}) {
      SCOPED_TRACE(offset);
      expect_reference(random_row(777, type, 1, offset), type);
      expect_reference(random_row(5000, type, 1, offset), type);
    }
    for (const float scale : {0.1F, 0.7F, 1 / 0.7F, 10.0F, 100.0F, 1e-3F, 1e4F})
      for (const double offset : {0.0, 50.0, -1e4}) {
        SCOPED_TRACE(testing::Message() << "scale " << scale << ", offset " << offset);
        expect_reference(random_row(4500, type, 2, offset), type, scale);
      }
  }
}

TEST_P(RowStatistics, InfinitelyUnlikelyColumns) {
  for (const DType type : both_types)
    for (const size_t front : {1, 31, 2000, 4096, 4100, 8192, 9998, 39998}) {
      SCOPED_TRACE(front);
      std::vector<double> row = random_row(front < 9999 ? 10000 : 40000, type, 2, -3);
      std::fill_n(row.begin(), front, none);
      row.back() = 1.5;
      if (front < 9000) row[9500] = none;
      expect_reference_either_way(row, type);
    }
}

TEST_P(RowStatistics, NotANumberIsNotHidden) {
  const auto nan = static_cast<double>(nan_value);
  on_every_target([&] {
    for (const DType type : both_types)
      for (const double bad : {nan, std::copysign(nan, -1), HUGE_VAL})
        for (const double others : {2.0, -5.0, none})
          for (const size_t at : pick<size_t>({0, 5, 40, 4095, 4096, 5099}, {0, 8, 5099})) {
            SCOPED_TRACE(testing::Message() << bad << " at " << at << " among " << others);
            std::vector<double> row(5100, others);
            row[at] = bad;
            for (const bool weighted : {false, true}) {
              const SoftmaxPartial m = partial(row, type, 1, weighted);
              EXPECT_TRUE(std::isnan(m.sum));
              EXPECT_NE(m.max, -infinity) << "would look like a shard without columns";
              EXPECT_EQ(std::isnan(m.weighted), weighted);
            }
          }
    EXPECT_TRUE(std::isnan(partial(std::vector<double>(3, nan)).sum));
  });
}

TEST_P(RowStatistics, NeighboursThreadsAndRunsChangeNoBits) {
  const int64_t tokens = on_host() ? 700 : 5, columns = on_host() ? 1003 : 20000;
  for (const DType type : both_types) {
    const LogitRows rows = random_logits(tokens, columns, type);
    const Matrix matrix = padded(rows, type);
    const auto one = partials(matrix, {columns, 1, true, 1});
    partials(Matrix(1, 5, DType::f32), {0, 1, true, 1});  // another turn of threads
    const auto two = partials(matrix, {columns, 1, true, 2});
    for (int64_t t = 0; t < tokens; ++t) {
      const auto at = static_cast<size_t>(t);
      EXPECT_TRUE(same_bits(one[at], two[at]));
      const auto row = rows.row(t);
      const SoftmaxPartial alone = partial({row.begin(), row.end()}, type);
      ASSERT_TRUE(!on_host() || same_bits(one[at], alone)) << "row " << t;
    }
  }
}

TEST_P(RowStatistics, ValuesDoNotDependOnWhetherTheEntropyIsWanted) {
  for (const DType type : both_types)
    for (const int64_t columns : {3, 333, 10000})
      for (const bool masked : {false, true}) {
        std::vector<double> row = random_row(columns, type);
        if (masked) row[1] = none;
        const SoftmaxPartial with = partial(row, type, 0.8F),
                             without = partial(row, type, 0.8F, false);
        EXPECT_EQ(with.max, without.max);
        EXPECT_EQ(with.sum, without.sum);
        EXPECT_LT(with.weighted, 0);
        EXPECT_EQ(without.weighted, 0);
      }
}

TEST_P(RowStatistics, PartsMergeToTheWholeRow) {
  EXPECT_TRUE(rc::check("partials of parts", [&] {
    const DType type = both_types.at(*rc::gen::inRange<size_t>(0, 2));
    const auto columns = *rc::gen::inRange<int64_t>(1, 6000);
    const auto cut = *rc::gen::inRange<int64_t>(0, columns + 1);
    const auto size = *rc::gen::element(0.1, 2.0, 50.0);
    const auto scale = *rc::gen::element(0.5F, 1.0F, 3.0F);
    std::vector<double> row = random_row(columns, type, size, *rc::gen::element(0.0, 30.0, -5e3),
                                         *rc::gen::arbitrary<uint64_t>());
    std::fill_n(row.begin(), *rc::gen::inRange<int64_t>(0, columns), none);
    const SoftmaxPartial a = partial({row.begin(), row.begin() + cut}, type, scale),
                         b = partial({row.begin() + cut, row.end()}, type, scale);
    RC_ASSERT(worst_share(row, Merged({a, b}, static_cast<double>(scale))) <= 1);
  }));
}

TEST_P(RowStatistics, GoldenRows) {
  constexpr double lse[] = {7.748163688, 7.575016135, 7.792737857, 7.783393937,
                            7.837148456, 7.651064173, 7.784641104, 7.720435309};
  constexpr double logprob[] = {-3.123163688,  -7.825016135, -12.917737857, -5.658393937,
                                -10.587148456, -5.776064173, -10.784641104, -3.470435309};
  constexpr double entropy[] = {2.643832576, 2.637051615, 2.653252468, 2.676617565,
                                2.655697487, 2.672440759, 2.723055265, 2.654009122};
  const LogitRows rows = golden_logits();
  const std::vector<int32_t> targets = golden_targets();
  for (const DType type : both_types)
    for (int64_t s = 0; s < 8; ++s) {
      const auto row = rows.row(s);
      const Merged got({partial({row.begin(), row.end()}, type)});
      const double z = row[targets[s]];
      EXPECT_NEAR(got.max + std::log(got.sum), lse[s], logprob_tolerance() * lse[s]);
      EXPECT_NEAR(got.logprob(z), logprob[s], logprob_tolerance() * logprob_scale(logprob[s]));
      EXPECT_NEAR(got.entropy(), entropy[s], logprob_tolerance() * entropy_scale(64));
    }
}

TEST_P(RowStatistics, GoldenSpecialRows) {
  const double tolerance = logprob_tolerance();
  const Merged ramp({partial({0, 1, 2, 3, 4})});
  EXPECT_NEAR(ramp.logprob(0), -4.451914396, tolerance * 5);
  EXPECT_NEAR(ramp.entropy(), 0.999972828, tolerance);
  const Merged masked({partial({0, 1, none})});
  EXPECT_NEAR(masked.logprob(1), -0.313261688, tolerance);
  EXPECT_EQ(masked.logprob(none), none);
  EXPECT_NEAR(masked.entropy(), 0.582203109, tolerance);
  const Merged shifted({partial({1e4, 1e4, 0})});
  EXPECT_NEAR(shifted.logprob(1e4), -0.693147181, tolerance);
  EXPECT_NEAR(shifted.logprob(0), -10000.693147, 1e4 * tolerance);
  const Merged uniform({partial(std::vector<double>(64, 2.5))});
  EXPECT_NEAR(uniform.logprob(2.5), -4.158883083, 5 * tolerance);
  EXPECT_NEAR(uniform.entropy(), 4.158883083, 5 * tolerance);
}

// ---- cross partials ----

TEST_P(RowStatistics, CrossPartialsMatchTheReferenceForAllTypes) {
  const auto lengths = pick<int64_t>({1, 2, 15, 31, 32, 33, 64, 500, 1023, 1024, 1025, 5000, 40000},
                                     {1, 2, 15, 33, 2051, 9001});
  for (const DType s : both_types)
    for (const DType t : both_types)
      for (const int64_t columns : lengths)
        for (const double offset : {0.0, 1e4}) {
          SCOPED_TRACE(testing::Message() << columns << " columns, offset " << offset);
          expect_cross_entropy(random_row(columns, s, 3, offset), s,
                               random_row(columns, t, 3, -offset, 7), t, offset == 0 ? 0 : 1);
        }
  on_every_target([&] {
    for (const int64_t columns : {3, 47, 2050})
      for (const DType s : both_types)
        for (const DType t : both_types)
          expect_cross_entropy(random_row(columns, s), s, random_row(columns, t, 2, 0, 7), t, 1);
  });
}

TEST_P(RowStatistics, CrossPartialsOfRisingRows) {
  std::vector<double> up(20000), down(20000);
  for (size_t i = 0; i < up.size(); ++i) up[i] = down[19999 - i] = 0.03125 * static_cast<double>(i);
  for (const auto& [s, t] : {std::pair{up, down}, std::pair{down, up}, std::pair{up, up}})
    expect_cross_entropy(s, DType::f32, t, DType::f32);
}

TEST_P(RowStatistics, CrossPartialsOfInfinitelyUnlikelyColumns) {
  for (const DType type : both_types) {
    const DType other = type == DType::f32 ? DType::bf16 : DType::f32;
    const std::vector<double> s = random_row(4000, DType::bf16),
                              t = random_row(4000, DType::bf16, 2, 0, 7);
    for (const double mask : {none, stored(-3.3e38, DType::bf16)})
      for (const size_t begin : pick<size_t>({0, 10, 1024, 3990}, {0, 2000, 3990}))
        for (const size_t count : pick<size_t>({1, 10}, {10})) {
          SCOPED_TRACE(testing::Message() << mask << ", " << count << " from " << begin);
          std::vector<double> masked_s = s, masked_t = t;
          std::fill_n(masked_s.begin() + static_cast<ptrdiff_t>(begin), count, mask);
          std::fill_n(masked_t.begin() + static_cast<ptrdiff_t>(begin), count, mask);
          expect_cross_entropy(masked_s, type, masked_t, type);
          expect_cross_entropy(s, other, masked_t, type);
          expect_cross_entropy(masked_s, type, t, other);  // infinite, or up to 3.3e38
          if (mask != none) continue;
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

TEST_P(RowStatistics, CrossPartialsOfNothingAndOfWhatIsNotANumber) {
  const std::vector<double> nothing(40, none), some(40, 1.0), good(1600, 1.0);
  const CrossPartial neither = cross(nothing, DType::f32, nothing, DType::f32);
  EXPECT_EQ(neither.student_max, -infinity);
  EXPECT_EQ(neither.teacher_max, -infinity);
  EXPECT_EQ(neither.student_sum + neither.teacher_sum + neither.cross, 0);
  EXPECT_EQ(cross(nothing, DType::f32, some, DType::f32).cross, -infinity);
  const CrossPartial no_teacher = cross(some, DType::f32, nothing, DType::f32);
  EXPECT_EQ(no_teacher.student_sum, 40);
  EXPECT_EQ(no_teacher.cross, 0);
  for (const double bad : {static_cast<double>(nan_value), HUGE_VAL})
    for (const size_t at : {0, 33, 1500}) {
      std::vector<double> row = good;
      row[at] = bad;
      EXPECT_TRUE(std::isnan(cross_entropy(cross(row, DType::f32, good, DType::bf16))));
      EXPECT_TRUE(std::isnan(cross_entropy(cross(good, DType::f32, row, DType::bf16))));
    }
}

TEST_P(RowStatistics, CrossPartialsOfAnyNumberOfThreads) {
  const int64_t tokens = on_host() ? 600 : 3;
  const DeviceMatrix student(padded(random_logits(tokens, 1003, DType::f32), DType::f32).ref(),
                             stream()),
      teacher(padded(random_logits(tokens, 1003, DType::f32, 2, 7), DType::bf16).ref(), stream());
  std::vector<CrossPartial> one(tokens), two = one;
  kernels().cross_partials(student.ref(), teacher.ref(), 1003, 1, one);
  kernels().cross_partials(student.ref(), teacher.ref(), 1003, 2, two);
  EXPECT_EQ(0, std::memcmp(one.data(), two.data(), one.size() * sizeof(CrossPartial)));
  for (const CrossPartial& m : one) ASSERT_FALSE(std::isnan(m.cross));
}

TEST_P(RowStatistics, CrossPartialsOfGoldenRows) {
  constexpr double value[] = {8.344218829, 7.786752955, 7.138260753, 7.456781096,
                              7.809284165, 9.052951627, 7.284411675, 6.842543003};
  const LogitRows students = golden_logits(), teachers = golden_teacher();
  for (int64_t r = 0; r < 8; ++r) {
    const auto s = students.row(r), t = teachers.row(r);
    for (const DType type : both_types)
      EXPECT_NEAR(
          cross_entropy(cross({s.begin(), s.end()}, type, {t.begin(), t.end()}, DType::bf16)),
          value[r], logprob_tolerance() * value[r]);
  }
  EXPECT_NEAR(cross_entropy(cross({0, 1, 2, 3, 4}, DType::f32, {4, 3, 2, 1, 0}, DType::f32)),
              3.903855964, 4 * logprob_tolerance());
}

}  // namespace gyre::test::row_kernels
