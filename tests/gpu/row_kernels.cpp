// Row statistics and row gradients on the device, against references in double precision and the
// host's kernels: any alignment and number of columns, what is not a number, padding.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
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
using test::random_logits;

constexpr double none = -HUGE_VAL;
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();
constexpr double lowest = static_cast<double>(std::numeric_limits<float>::lowest());
constexpr std::array both_types = {DType::f32, DType::bf16};

class RowKernelsTest : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) kernels_ = make_cuda_row_kernels(stream());
  }
  RowKernels& kernels() { return *kernels_; }

  std::vector<SoftmaxPartial> partials(const Matrix& logits, const RowScan& scan,
                                       int64_t lead = 0) {
    const DeviceMatrix on_device(logits.ref(), stream(), lead);
    std::vector<SoftmaxPartial> out(static_cast<size_t>(logits.rows()), {nan_value, -7, -7});
    kernels_->partials(on_device.ref(), scan, out);
    return out;
  }

 private:
  std::unique_ptr<RowKernels> kernels_;
};
using RowMomentsOnDevice = RowKernelsTest;
using RowCrossMomentsOnDevice = RowKernelsTest;
using RowGradientOnDevice = RowKernelsTest;
using TokenIdsOnDevice = RowKernelsTest;

/// With three columns of NaN behind the valid ones.
Matrix padded(const LogitRows& rows, DType type) {
  return rows.shard(partition_of(std::vector<int64_t>{rows.vocab_size + 3}, rows.vocab_size), 0,
                    type);
}
LogitRows one_row(const std::vector<double>& row) {
  LogitRows rows(1, std::ssize(row));
  rows.values = row;
  return rows;
}

double share_of(double got, double want, double tolerance) {
  if (got == want || (std::isnan(got) && std::isnan(want))) return 0;
  const double share = std::abs(got - want) / tolerance;
  return std::isnan(share) ? HUGE_VAL : share;
}

/// Partials of the device against those of the host: the logarithm of the sum is what counts.
double worst_share(const SoftmaxPartial& got, const SoftmaxPartial& want, int64_t columns) {
  if (std::isnan(want.sum) || want.sum == 0)
    return std::max({share_of(got.max, want.max, 0), share_of(got.sum, want.sum, 0),
                     share_of(got.weighted, want.weighted, 0)});
  const auto entropy = [](const SoftmaxPartial& m) {
    return std::log(static_cast<double>(m.sum)) -
           static_cast<double>(m.weighted) / static_cast<double>(m.sum);
  };
  return std::max(
      {share_of(got.max, want.max, 0),
       share_of(std::log(static_cast<double>(got.sum)), std::log(static_cast<double>(want.sum)),
                logprob_tolerance()),
       share_of(entropy(got), entropy(want), logprob_tolerance() * entropy_scale(columns))});
}

TEST_F(RowMomentsOnDevice, MatchTheReferenceFromAnyAddress) {
  for (const DType type : both_types)
    for (const int64_t columns : {1, 3, 7, 8, 9, 63, 255, 1025, 2049, 5000})
      for (const int64_t lead : {0, 1, 5})
        for (const double offset : {0.0, 1e4}) {
          SCOPED_TRACE(testing::Message() << name_of(type) << ", " << columns << " columns, lead "
                                          << lead << ", offset " << offset);
          LogitRows rows = random_logits(2, columns, type, 3);
          for (double& z : rows.values) {
            const auto x = static_cast<float>(z + offset);
            z = static_cast<double>(type == DType::bf16 ? to_float(to_bf16(x)) : x);
          }
          const std::vector<SoftmaxPartial> got =
              partials(padded(rows, type), {columns, 0.75F, true, 1}, lead);
          for (int64_t t = 0; t < 2; ++t) {
            const SoftmaxPartial& m = got[static_cast<size_t>(t)];
            const auto row = rows.row(t);
            const TokenScore want = score_row_reference(row, 0, 1 / 0.75);
            const double log_sum = std::log(static_cast<double>(m.sum));
            const double x = (row[0] - static_cast<double>(m.max)) * 0.75;
            EXPECT_EQ(static_cast<double>(m.max), *std::max_element(row.begin(), row.end()));
            EXPECT_LE(share_of(x - log_sum, want.logprob,
                               logprob_tolerance() * logprob_scale(want.logprob)),
                      1);
            EXPECT_LE(
                share_of(log_sum - static_cast<double>(m.weighted) / static_cast<double>(m.sum),
                         want.entropy, logprob_tolerance() * entropy_scale(columns)),
                1);
          }
        }
}

TEST_F(RowMomentsOnDevice, RowsOfSeveralPartsInAnyOrderOfSizes) {
  constexpr int64_t columns = 40000;
  LogitRows rows(4, columns);
  for (int64_t v = 0; v < columns; ++v) {
    rows.at(0, v) = 0.005 * static_cast<double>(v);
    rows.at(1, v) = -0.005 * static_cast<double>(v);
    rows.at(2, v) = v < 30000 ? none : 0.001 * static_cast<double>(v % 1000);
    rows.at(3, v) = v % 3 == 0 ? lowest : 1;
  }
  const Matrix logits = padded(rows, DType::f32);
  const RowScan scan{columns, 1, true, 1};
  std::vector<SoftmaxPartial> want(4);
  softmax_partials(logits.ref(), scan, want);
  const std::vector<SoftmaxPartial> got = partials(logits, scan, 3);
  for (size_t t = 0; t < 4; ++t) EXPECT_LE(worst_share(got[t], want[t], columns), 1) << t;
}

TEST_F(RowMomentsOnDevice, SpecialRowsAreThoseOfTheHost) {
  std::vector<std::vector<double>> special = {
      std::vector<double>(700, none),   std::vector<double>(700, lowest),
      std::vector<double>(700, 3e38),   std::vector<double>(700, -2.5),
      std::vector<double>(700, -1e-40),
  };
  std::vector<double> half(700, none), masked(700, lowest), far(700, -3e38);
  for (size_t v = 300; v < 700; ++v) half[v] = 0.01 * static_cast<double>(v);
  masked[650] = 5;
  far[3] = 3e38;
  special.insert(special.end(), {half, masked, far});
  for (const double bad : {HUGE_VAL, std::numeric_limits<double>::quiet_NaN()})
    for (const size_t at : {size_t{0}, size_t{8}, size_t{699}}) {
      special.push_back(half);
      special.back()[at] = bad;
      special.emplace_back(700, none);
      special.back()[at] = bad;
    }
  for (const DType type : both_types)
    for (size_t i = 0; i < special.size(); ++i)
      for (const bool weighted : {false, true}) {
        const Matrix logits = padded(one_row(special[i]), type);
        const RowScan scan{700, 0.5F, weighted, 1};
        SoftmaxPartial want;
        softmax_partials(logits.ref(), scan, {&want, 1});
        EXPECT_LE(worst_share(partials(logits, scan)[0], want, 700), 1)
            << "row " << i << ' ' << name_of(type) << (weighted ? " weighted" : "");
      }
}

TEST_F(RowMomentsOnDevice, TheWeightedSumChangesNoOtherBits) {
  const Matrix logits = padded(random_logits(3, 3000, DType::bf16, 3), DType::bf16);
  const std::vector<SoftmaxPartial> plain = partials(logits, {3000, 1, false, 1}),
                                    weighted = partials(logits, {3000, 1, true, 1});
  for (size_t t = 0; t < 3; ++t) {
    EXPECT_EQ(plain[t].max, weighted[t].max);
    EXPECT_EQ(plain[t].sum, weighted[t].sum);
    EXPECT_EQ(plain[t].weighted, 0);
    EXPECT_LT(weighted[t].weighted, 0);
  }
}

TEST_F(RowMomentsOnDevice, EmptyShardsAndNoRows) {
  const Matrix logits(3, 5, DType::f32);
  for (const SoftmaxPartial& m : partials(logits, {0, 1, true, 1})) {
    EXPECT_EQ(m.max, -HUGE_VALF);
    EXPECT_EQ(m.sum, 0);
    EXPECT_EQ(m.weighted, 0);
  }
  EXPECT_TRUE(partials(Matrix(0, 5, DType::f32), {5, 1, true, 1}).empty());
  std::vector<SoftmaxPartial> out(2);
  kernels().partials({nullptr, DType::bf16, 2, 0, 0}, {0, 1, false, 1}, out);
  EXPECT_EQ(out[1].sum, 0);
}

TEST_F(RowMomentsOnDevice, EveryRunHasTheSameBits) {
  const Matrix logits = padded(random_logits(5, 20000, DType::bf16, 3), DType::bf16);
  const std::vector<SoftmaxPartial> first = partials(logits, {20000, 1, true, 1});
  for (int run = 0; run < 3; ++run) {
    if (run == 1) partials(Matrix(1, 5, DType::f32), {0, 1, true, 1});  // another turn of threads
    const std::vector<SoftmaxPartial> again = partials(logits, {20000, 1, true, 1});
    EXPECT_EQ(0, std::memcmp(first.data(), again.data(), first.size() * sizeof(SoftmaxPartial)));
  }
}

// ---- cross partials ----

double cross_entropy(const CrossPartial& m) {
  return std::log(static_cast<double>(m.student_sum)) -
         static_cast<double>(m.cross) / static_cast<double>(m.teacher_sum);
}

class CrossOnDevice : public RowKernelsTest {
 protected:
  CrossPartial run(const std::vector<double>& student, DType student_type,
                   const std::vector<double>& teacher, DType teacher_type, int64_t lead = 0) {
    const DeviceMatrix s(padded(one_row(student), student_type).ref(), stream(), lead),
        t(padded(one_row(teacher), teacher_type).ref(), stream());
    CrossPartial out;
    kernels().cross_partials(s.ref(), t.ref(), std::ssize(student), 1, {&out, 1});
    return out;
  }
  void expect_reference(const std::vector<double>& student, DType student_type,
                        const std::vector<double>& teacher, DType teacher_type, int64_t lead = 0) {
    const CrossPartial m = run(student, student_type, teacher, teacher_type, lead);
    EXPECT_EQ(static_cast<double>(m.student_max),
              *std::max_element(student.begin(), student.end()));
    EXPECT_EQ(static_cast<double>(m.teacher_max),
              *std::max_element(teacher.begin(), teacher.end()));
    const double want = soft_cross_entropy_reference(student, teacher);
    EXPECT_LE(share_of(cross_entropy(m), want,
                       std::isinf(want) ? 0 : logprob_tolerance() * logprob_scale(want)),
              1)
        << cross_entropy(m) << ", expected " << want;
    const double teacher_logprob = log_softmax_reference(teacher)[0];
    if (teacher[0] != none) {
      EXPECT_LE(share_of(teacher[0] - static_cast<double>(m.teacher_max) -
                             std::log(static_cast<double>(m.teacher_sum)),
                         teacher_logprob, logprob_tolerance() * logprob_scale(teacher_logprob)),
                1);
    }
  }
};

std::vector<double> random_row(int64_t columns, uint64_t seed) {
  const LogitRows rows = random_logits(1, columns, DType::bf16, 2, seed);
  return {rows.values.begin(), rows.values.end()};
}

TEST_F(CrossOnDevice, MatchesTheReferenceForAllTypes) {
  for (const DType s : both_types)
    for (const DType t : both_types)
      for (const int64_t columns : {1, 2, 15, 33, 2051, 9001})
        for (const int64_t lead : {0, 1}) {
          SCOPED_TRACE(testing::Message() << columns << " columns, lead " << lead);
          expect_reference(random_row(columns, 1), s, random_row(columns, 7), t, lead);
        }
  std::vector<double> up(20000), down(20000);
  for (size_t i = 0; i < up.size(); ++i) up[i] = down[19999 - i] = 0.03125 * static_cast<double>(i);
  expect_reference(up, DType::f32, down, DType::f32);
  expect_reference(down, DType::f32, up, DType::f32);
  expect_reference(up, DType::f32, up, DType::f32);
}

TEST_F(CrossOnDevice, ColumnsThatAreMasked) {
  const std::vector<double> s = random_row(4000, 1), t = random_row(4000, 7);
  for (const size_t begin : {size_t{0}, size_t{10}, size_t{2000}, size_t{3990}})
    for (const double mask : {none, lowest}) {
      SCOPED_TRACE(testing::Message() << mask << " from " << begin);
      std::vector<double> masked_s = s, masked_t = t;
      std::fill_n(masked_s.begin() + static_cast<ptrdiff_t>(begin), 10, mask);
      std::fill_n(masked_t.begin() + static_cast<ptrdiff_t>(begin), 10, mask);
      expect_reference(masked_s, DType::f32, masked_t, DType::f32);
      expect_reference(s, DType::f32, masked_t, DType::bf16);
      if (mask == none) expect_reference(masked_s, DType::bf16, t, DType::f32);  // infinite
      std::fill(masked_s.begin(), masked_s.begin() + 2000, mask);
      std::fill(masked_t.begin(), masked_t.begin() + 3000, mask);
      expect_reference(masked_s, DType::f32, masked_t, DType::f32);
      masked_t = t;
      masked_t[begin] = -500;  // as good as 0, but not 0
      if (mask == none) expect_reference(masked_s, DType::f32, masked_t, DType::f32);
    }
}

TEST_F(CrossOnDevice, RowsOfNothingAndWhatIsNotANumber) {
  const std::vector<double> nothing(40, none), some(40, 1.0);
  const CrossPartial neither = run(nothing, DType::f32, nothing, DType::f32);
  EXPECT_EQ(neither.student_max, -HUGE_VALF);
  EXPECT_EQ(neither.teacher_max, -HUGE_VALF);
  EXPECT_EQ(neither.student_sum + neither.teacher_sum + neither.cross, 0);
  EXPECT_EQ(run(nothing, DType::f32, some, DType::f32).cross, -HUGE_VALF);
  const CrossPartial no_teacher = run(some, DType::f32, nothing, DType::f32);
  EXPECT_EQ(no_teacher.student_sum, 40);
  EXPECT_EQ(no_teacher.cross, 0);
  for (const double bad : {HUGE_VAL, std::numeric_limits<double>::quiet_NaN()}) {
    std::vector<double> row(1600, 1.0);
    const std::vector<double> good = row;
    row[1500] = bad;
    EXPECT_TRUE(std::isnan(cross_entropy(run(row, DType::f32, good, DType::bf16))));
    EXPECT_TRUE(std::isnan(cross_entropy(run(good, DType::f32, row, DType::bf16))));
  }
}

// ---- gradients ----

RowNormalizer normalizer_of(std::span<const double> row, double temperature) {
  double max = none, sum = 0;
  for (const double z : row) max = std::max(max, z);
  for (const double z : row) sum += z == none ? 0 : std::exp((z - max) / temperature);
  return {static_cast<float>(max), static_cast<float>(std::log(sum))};
}

/// Gradients of rows: ids with weights, of which some are nobody's or double, entropies, and the
/// last row without any.
struct Gradients {
  LogitRows rows;
  int64_t per_row;
  double temperature;
  static constexpr int32_t first_column = 1000;
  std::vector<int32_t> ids;
  std::vector<double> g, h;
  std::vector<float> weights;
  std::vector<RowNormalizer> normalizers;
  std::vector<GradientCoefficients> coefficients;

  Gradients(LogitRows rows_, int64_t per_row_, double temperature_ = 1)
      : rows(std::move(rows_)), per_row(per_row_), temperature(temperature_) {
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const bool last = t + 1 == rows.tokens;
      double sum = 0;
      for (int64_t k = 0; k < per_row; ++k) {
        ids.push_back(static_cast<int32_t>((7 * k * k + 3 * t) % (rows.vocab_size + 2)) - 1);
        if (k % 5 == 4) ids.back() = ids[ids.size() - 4];
        g.push_back(last ? 0 : 0.25 * static_cast<double>((k + t) % 9) - 0.75);
        weights.push_back(static_cast<float>(g.back() / temperature));
        sum += g.back();
      }
      h.push_back(last || t % 2 == 1 ? 0 : -1.5);
      const double entropy =
          h.back() == 0 ? 0 : score_row_reference(rows.row(t), -1, temperature).entropy;
      normalizers.push_back(normalizer_of(rows.row(t), temperature));
      coefficients.push_back({static_cast<float>(-(sum + h.back() * entropy) / temperature),
                              static_cast<float>(-h.back() / temperature)});
    }
    for (int32_t& id : ids) id += first_column;
  }
  RowTokenIds token_ids() const { return {ids, weights, per_row, first_column}; }
  RowPass pass() const { return {rows.vocab_size, static_cast<float>(1 / temperature), 1}; }

  double worst_share(const Matrix& got, DType type) const {
    double worst = 0;
    for (int64_t t = 0; t < rows.tokens; ++t) {
      const auto at = static_cast<size_t>(t), first = static_cast<size_t>(t * per_row);
      const auto count = static_cast<size_t>(per_row);
      std::vector<int32_t> columns(ids.begin() + static_cast<ptrdiff_t>(first),
                                   ids.begin() + static_cast<ptrdiff_t>(first + count));
      for (int32_t& id : columns) id -= first_column;
      const auto g_row = std::span(g).subspan(first, count);
      const auto want = score_gradient_reference(rows.row(t), columns, g_row, h[at], temperature);
      const auto log_p = log_softmax_reference(rows.row(t), temperature);
      for (int64_t v = 0; v < got.cols(); ++v) {
        const auto id = static_cast<size_t>(v);
        if (v >= rows.vocab_size) {
          worst = std::max(worst, share_of(got.at(t, v), 0, 0));
          continue;
        }
        double weight = 0;
        for (size_t k = 0; k < count; ++k)
          weight += columns[k] == v ? std::abs(g_row[k]) / temperature : 0;
        const double scale =
            logit_gradient_scale(log_p[id], static_cast<double>(coefficients[at].a),
                                 static_cast<double>(coefficients[at].b), weight);
        worst = std::max(worst,
                         share_of(got.at(t, v), want[id], logit_gradient_tolerance(type) * scale));
      }
    }
    return worst;
  }
};

TEST_F(RowGradientOnDevice, MatchesTheReferenceInPlaceAndNot) {
  for (const DType from : both_types)
    for (const DType to : both_types)
      for (const int64_t columns : {1, 7, 33, 300, 2500})
        for (const int64_t per_row : {0, 1, 70})
          for (const int64_t lead : {0, 3}) {
            SCOPED_TRACE(testing::Message()
                         << name_of(from) << " to " << name_of(to) << ", " << columns
                         << " columns, " << per_row << " ids, lead " << lead);
            LogitRows rows = random_logits(4, columns, DType::bf16, 3);
            if (columns > 2) rows.at(2, 1) = none;
            const Gradients c(rows, per_row, per_row == 1 ? 1 : 0.7);
            DeviceMatrix logits(padded(rows, from).ref(), stream(), lead);
            DeviceMatrix out(4, columns + 3, to, stream());
            kernels().gradient(std::as_const(logits).ref(), c.pass(), c.normalizers, c.coefficients,
                               c.token_ids(), out.ref());
            const Matrix apart = out.host();
            EXPECT_LE(c.worst_share(apart, to), 1);
            if (from != to) continue;
            kernels().gradient(std::as_const(logits).ref(), c.pass(), c.normalizers, c.coefficients,
                               c.token_ids(), logits.ref());
            const Matrix in_place = logits.host();
            for (int64_t t = 0; t < 4; ++t)
              for (int64_t v = 0; v < columns + 3; ++v)
                ASSERT_EQ(in_place.at(t, v), apart.at(t, v)) << t << ' ' << v;
          }
}

TEST_F(RowGradientOnDevice, RowsOfSeveralParts) {
  const LogitRows rows = random_logits(2, 36000, DType::bf16, 3);
  const Gradients c(rows, 5);
  for (const DType type : both_types)
    for (const int64_t lead : {0, 1}) {
      DeviceMatrix logits(padded(rows, type).ref(), stream(), lead);
      kernels().gradient(std::as_const(logits).ref(), c.pass(), c.normalizers, c.coefficients,
                         c.token_ids(), logits.ref());
      EXPECT_LE(c.worst_share(logits.host(), type), 1) << name_of(type) << ", lead " << lead;
    }
}

TEST_F(RowGradientOnDevice, WeightsOfOneIdAreAddedAndRoundedOnce) {
  // 1 + 2^-9 six times is 1.01171875: lost if each addition were rounded to bf16.
  const std::vector<int32_t> ids(7, 5);
  std::vector<float> weights(7, 0x1p-9F);
  weights[0] = 1;
  DeviceMatrix out(1, 20, DType::bf16, stream());
  kernels().gradient(std::as_const(out).ref(), {20, 1, 1}, std::vector<RowNormalizer>{{0, 0}},
                     std::vector<GradientCoefficients>{{0, 0}}, {ids, weights, 7, 0}, out.ref());
  const Matrix got = out.host();
  for (int64_t v = 0; v < 20; ++v)
    EXPECT_EQ(got.at(0, v), v == 5 ? static_cast<double>(to_float(to_bf16(1 + 6 * 0x1p-9F))) : 0);
}

TEST_F(RowGradientOnDevice, RowsWithoutGradientAreNotReadAndOthersKeepNaN) {
  // Of NaN logits: no coefficient and no weight; weights only; a bad normaliser; one, but nothing
  // asked.
  const std::vector<RowNormalizer> rows = {{0, 0}, {0, 0}, {nan_value, 1}, {0, HUGE_VALF}};
  const std::vector<GradientCoefficients> coefficients = {{0, 0}, {0, 0}, {1, 0}, {0, 0}};
  const std::vector<int32_t> ids = {3, 3, 3, 3};
  const std::vector<float> weights = {0, 2, 1, 0};
  for (const DType type : both_types) {
    DeviceMatrix logits(4, 40, type, stream());
    kernels().gradient(std::as_const(logits).ref(), {38, 1, 1}, rows, coefficients,
                       {ids, weights, 1, 0}, logits.ref());
    const Matrix got = logits.host();
    for (int64_t v = 0; v < 40; ++v) {
      EXPECT_EQ(got.at(0, v), 0);
      EXPECT_EQ(got.at(1, v), v == 3 ? 2 : 0);
      EXPECT_EQ(std::isnan(got.at(2, v)), v < 38) << v;
      EXPECT_EQ(got.at(3, v), 0);
    }
  }
}

TEST_F(RowGradientOnDevice, LogSoftmaxAndProbabilities) {
  for (const DType from : both_types)
    for (const DType to : both_types)
      for (const int64_t columns : {5, 200, 1100}) {
        LogitRows rows = random_logits(2, columns, DType::bf16, 3);
        rows.at(1, 2) = none;
        const DeviceMatrix logits(padded(rows, from).ref(), stream(), 1);
        std::vector<RowNormalizer> normalizers;
        for (int64_t t = 0; t < 2; ++t) normalizers.push_back(normalizer_of(rows.row(t), 2));
        for (const bool exponentiate : {false, true}) {
          DeviceMatrix out(2, columns + 3, to, stream(), 1);
          kernels().log_softmax(logits.ref(), {columns, 0.5F, 1}, normalizers, exponentiate,
                                out.ref());
          const Matrix got = out.host();
          for (int64_t t = 0; t < 2; ++t) {
            const auto want = log_softmax_reference(rows.row(t), 2);
            for (int64_t v = 0; v < columns + 3; ++v) {
              const double log_p = v < columns ? want[static_cast<size_t>(v)] : none;
              const double value = exponentiate ? std::exp(log_p) : log_p;
              const double tolerance =
                  std::isinf(value) || value == 0
                      ? 0
                      : logit_gradient_tolerance(to) * (exponentiate
                                                            ? logit_gradient_scale(log_p, 1, 0, 0)
                                                            : logprob_scale(log_p));
              ASSERT_LE(share_of(got.at(t, v), value, tolerance), 1) << t << ' ' << v;
            }
          }
        }
      }
  DeviceMatrix bad(1, 5, DType::f32, stream());
  kernels().log_softmax(std::as_const(bad).ref(), {4, 1, 1},
                        std::vector<RowNormalizer>{{1, nan_value}}, false, bad.ref());
  const Matrix got = bad.host();
  for (int64_t v = 0; v < 4; ++v) EXPECT_TRUE(std::isnan(got.at(0, v)));
  EXPECT_EQ(got.at(0, 4), none);
}

TEST_F(RowGradientOnDevice, SumsOfRows) {
  for (const DType type : both_types)
    for (const int64_t columns : {1, 33, 700, 9001}) {
      const LogitRows rows = random_logits(3, columns, DType::bf16);
      const DeviceMatrix values(padded(rows, type).ref(), stream(), 1);
      std::vector<double> got(3);
      kernels().sums(values.ref(), columns, 1, got);
      for (int64_t t = 0; t < 3; ++t) {
        double want = 0;
        for (const double x : rows.row(t)) want += x;  // of 8 bits each: exact
        ASSERT_EQ(got[static_cast<size_t>(t)], want) << columns << ' ' << t;
      }
    }
}

TEST_F(RowGradientOnDevice, LogSoftmaxGradientIsThatOfTheHost) {
  for (const DType from : both_types)
    for (const DType of_g : both_types)
      for (const DType to : both_types)
        for (const int64_t columns : {2, 33, 700, 9001}) {
          LogitRows rows = random_logits(4, columns, DType::bf16);
          const LogitRows g = random_logits(4, columns, DType::bf16, 1, 7);
          rows.at(1, 1) = none;
          std::vector<RowNormalizer> normalizers;
          for (int64_t t = 0; t < 4; ++t) normalizers.push_back(normalizer_of(rows.row(t), 2));
          normalizers[3].log_sum = nan_value;
          const std::vector<float> sums = {3, -2, 0.25F, 1};
          const RowPass pass{columns, 0.5F, 1};
          const Matrix logits = padded(rows, from), above = padded(g, of_g);
          Matrix want(4, columns + 3, to);
          row_log_softmax_gradient(logits.ref(), above.ref(), pass, normalizers, sums, want.ref());
          DeviceMatrix on_device(logits.ref(), stream(), 1), apart(4, columns + 3, to, stream());
          const DeviceMatrix g_there(above.ref(), stream());
          DeviceMatrix& out = from == to ? on_device : apart;
          kernels().log_softmax_gradient(std::as_const(on_device).ref(), g_there.ref(), pass,
                                         normalizers, sums, out.ref());
          const Matrix got = out.host();
          for (int64_t t = 0; t < 4; ++t)
            for (int64_t v = 0; v < columns + 3; ++v) {
              const double x = want.at(t, v);
              ASSERT_LE(share_of(got.at(t, v), x, 2 * epsilon_of(to) * std::abs(x) + 1e-6), 1)
                  << t << ' ' << v;
            }
        }
}

TEST_F(RowGradientOnDevice, CrossGradientMatchesTheReferenceForAllTypes) {
  const std::vector<float> g = {1, -2, 0.5, 0};
  for (const DType s : both_types)
    for (const DType t : both_types)
      for (const DType to : both_types)
        for (const int64_t columns : {2, 33, 700, 9001}) {
          LogitRows student = random_logits(4, columns, DType::bf16),
                    teacher = random_logits(4, columns, DType::bf16, 2, 7);
          student.at(1, 1) = teacher.at(1, 1) = teacher.at(2, 0) = none;
          DeviceMatrix logits(padded(student, s).ref(), stream(), 1);
          const DeviceMatrix teachers(padded(teacher, t).ref(), stream());
          DeviceMatrix apart(4, columns + 3, to, stream());
          DeviceMatrix& out = s == to ? logits : apart;
          std::vector<RowNormalizer> students, of_teachers;
          for (int64_t r = 0; r < 4; ++r) {
            students.push_back(normalizer_of(student.row(r), 1));
            of_teachers.push_back(normalizer_of(teacher.row(r), 1));
          }
          kernels().cross_gradient(std::as_const(logits).ref(), teachers.ref(), {columns, 1, 1},
                                   students, of_teachers, g, out.ref());
          const Matrix got = out.host();
          for (int64_t r = 0; r < 4; ++r) {
            const auto factor = static_cast<double>(g[static_cast<size_t>(r)]);
            const auto want =
                soft_cross_entropy_gradient_reference(student.row(r), teacher.row(r), factor);
            const auto log_q = log_softmax_reference(student.row(r)),
                       log_p = log_softmax_reference(teacher.row(r));
            for (int64_t v = 0; v < columns + 3; ++v) {
              const auto id = static_cast<size_t>(v);
              const double tolerance = v < columns
                                           ? logit_gradient_tolerance(to) *
                                                 (logit_gradient_scale(log_q[id], factor, 0, 0) +
                                                  logit_gradient_scale(log_p[id], factor, 0, 0))
                                           : 0;
              ASSERT_LE(share_of(got.at(r, v), v < columns ? want[id] : 0, tolerance), 1)
                  << r << ' ' << v;
            }
          }
        }
  DeviceMatrix student(2, 40, DType::f32, stream());
  const DeviceMatrix teacher(2, 40, DType::f32, stream());
  const std::vector<RowNormalizer> good(2, {0, 0}), bad(2, {0, nan_value});
  kernels().cross_gradient(std::as_const(student).ref(), teacher.ref(), {38, 1, 1}, good, bad,
                           std::vector<float>{0, 1}, student.ref());
  const Matrix got = student.host();
  for (int64_t v = 0; v < 40; ++v) {
    EXPECT_EQ(got.at(0, v), 0);
    EXPECT_EQ(std::isnan(got.at(1, v)), v < 38);
  }
}

/// Rows of many ties, and where their cuts are.
struct CutCase {
  int64_t columns;
  std::vector<int32_t> cuts;
};
class FilteredGradientOnDevice : public RowKernelsTest,
                                 public testing::WithParamInterface<CutCase> {};

TEST_P(FilteredGradientOnDevice, IsThatOfTheHost) {
  const int64_t columns = GetParam().columns;
  LogitRows rows(4, columns);
  for (int64_t t = 0; t < 4; ++t)
    for (int64_t v = 0; v < columns; ++v)
      rows.at(t, v) = static_cast<double>((v * 37 + t * 11) % 10) - 4;
  rows.at(2, 50) = none;
  const std::vector<int32_t> ids = {1003, 1066, 1050, 1010};  // dropped or not; -inf
  const std::vector<float> a = {-1, 0.5, -2, 0}, weights = {1, -0.5, 2, 3};
  for (const DType from : both_types)
    for (const DType to : both_types)
      for (const int32_t cut : GetParam().cuts) {
        SCOPED_TRACE(cut);
        std::vector<RowNormalizer> normalizers(4, {5, 1.25F});
        normalizers[1].log_sum = cut == 17 ? nan_value : 2;
        const std::vector<RowSurvivors> survivors(4, {2, cut});
        const Matrix logits = padded(rows, from);
        Matrix want(4, columns + 3, to);
        row_filtered_gradient(logits.ref(), {columns, 1, 1}, normalizers, survivors, a,
                              {ids, weights, 1, 1000}, want.ref());
        DeviceMatrix on_device(logits.ref(), stream(), 1), apart(4, columns + 3, to, stream());
        DeviceMatrix& out = from == to ? on_device : apart;
        kernels().filtered_gradient(std::as_const(on_device).ref(), {columns, 1, 1}, normalizers,
                                    survivors, a, {ids, weights, 1, 1000}, out.ref());
        const Matrix got = out.host();
        for (int64_t t = 0; t < 4; ++t)
          for (int64_t v = 0; v < columns + 3; ++v) {
            const bool dropped = v >= columns || want.at(t, v) == 0;
            const auto at = static_cast<size_t>(t);
            const double log_p = v < columns ? rows.at(t, v) - 6.25 : none;
            const double scale = logit_gradient_scale(
                log_p, static_cast<double>(a[at]), 0,
                ids[at] - 1000 == v ? std::abs(static_cast<double>(weights[at])) : 0);
            ASSERT_LE(share_of(got.at(t, v), want.at(t, v),
                               dropped ? 0 : logit_gradient_tolerance(to) * scale),
                      1)
                << t << ' ' << v;
          }
      }
}

INSTANTIATE_TEST_SUITE_P(Cuts, FilteredGradientOnDevice,
                         testing::Values(CutCase{103, {-5, 0, 8, 17, 35, 42, 70, 100, 120}},
                                         CutCase{17001, {5, 4103, 16389}}));

TEST_F(TokenIdsOnDevice, ScatterAddsUpAndGatherTakesWhatTheShardHas) {
  const std::vector<int32_t> ids = {100, 101, 100, 146, 147, 99, -1, 500, 146, 146, 146, 120};
  std::vector<float> weights(12);
  std::iota(weights.begin(), weights.end(), 1.0F);
  const LogitRows rows = random_logits(3, 47, DType::bf16);
  for (const DType type : both_types) {
    DeviceMatrix out(3, 50, type, stream());
    kernels().scatter_token_weights({ids, weights, 4, 100}, 47, out.ref(), 1);
    Matrix want(3, 50, type);
    scatter_token_weights({ids, weights, 4, 100}, 47, want.ref(), 1);
    const Matrix got = out.host();
    for (int64_t t = 0; t < 3; ++t)
      for (int64_t v = 0; v < 50; ++v) EXPECT_EQ(got.at(t, v), want.at(t, v)) << t << ' ' << v;
    const DeviceMatrix logits(padded(rows, type).ref(), stream());
    std::vector<float> values(12, -77), expected(12, -77);
    kernels().gather_token_logits(logits.ref(), ids, 4, 100, 47, values);
    gather_token_logits(padded(rows, type).ref(), ids, 4, 100, 47, expected);
    EXPECT_EQ(values, expected);
  }
  kernels().gather_token_logits({nullptr, DType::f32, 3, 0, 0}, {}, 0, 0, 0, {});
}

TEST_F(RowKernelsTest, ManyPassesReuseTheirMemory) {
  // More passes in a row than there are places for what they upload, none of them waited for.
  std::vector<DeviceMatrix> outs;
  for (int i = 0; i < 10; ++i) outs.emplace_back(2, 9, DType::f32, stream());
  for (int i = 0; i < 10; ++i) {
    const std::vector<int32_t> ids = {i % 9, (i + 1) % 9};
    const std::vector<float> weights(2, static_cast<float>(i + 1));
    kernels().scatter_token_weights({ids, weights, 1, 0}, 9, outs[static_cast<size_t>(i)].ref(), 1);
  }
  for (int i = 0; i < 10; ++i) {
    const Matrix got = outs[static_cast<size_t>(i)].host();
    for (int64_t v = 0; v < 9; ++v) {
      EXPECT_EQ(got.at(0, v), v == i % 9 ? i + 1 : 0);
      EXPECT_EQ(got.at(1, v), v == (i + 1) % 9 ? i + 1 : 0);
    }
  }
}

TEST_F(RowKernelsTest, OnlyADevicesStreamWillDo) {
  HostStream host;
  EXPECT_ANY_THROW(make_cuda_row_kernels(host));
}

}  // namespace GYRE_FILE
}  // namespace gyre
