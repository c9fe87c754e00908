// The convolution before a recurrence on one rank: the definition against closed forms and finite
// differences, the kernel against the definition.

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "core/token_random.hpp"
#include "recurrence/convolution.hpp"
#include "recurrence/convolution_reference.hpp"
#include "recurrence/convolution_rows.hpp"
#include "recurrence_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

std::vector<double> random_numbers(int64_t count, uint64_t seed) {
  std::vector<float> row(count);
  fill_token_row({seed, TokenTensor::q, false}, 0, row);
  return {row.begin(), row.end()};
}

double silu(double z) {
  return z / (1 + std::exp(-z));
}

TEST(RecurrenceConvolution, TheDefinitionReadsTheTokensBefore) {
  // Two channels, width 3: the last weight is of the token itself.
  const ConvolvedHead head({1, 10, 2, 20, 3, 30, 4, 40}, {0.5, 0.25, 1, 0, 0, 2}, 2, 3, false);
  const std::vector<double> z = {1, 20, 2.25, 40, 0.5 + 0.5 + 3, 60, 1 + 0.75 + 4, 80};
  for (size_t i = 0; i < z.size(); ++i) EXPECT_DOUBLE_EQ(head.y()[i], silu(z[i])) << i;
}

TEST(RecurrenceConvolution, TheDefinitionNormalisesHeads) {
  const ConvolvedHead head({3, -1, 0, 0}, {1, 1}, 2, 1, true);
  const double root = std::sqrt(silu(3) * silu(3) + silu(-1) * silu(-1) + 1e-6);
  EXPECT_DOUBLE_EQ(head.y()[0], silu(3) / root);
  EXPECT_DOUBLE_EQ(head.y()[1], silu(-1) / root);
  EXPECT_EQ(head.y()[2], 0);  // and not NaN
}

TEST(RecurrenceConvolution, GradientsOfTheDefinitionAreThoseOfFiniteDifferences) {
  constexpr int64_t tokens = 9, dim = 3, width = 4;
  const std::vector<double> x = random_numbers(tokens * dim, 1), w = random_numbers(dim * width, 2);
  const std::vector<double> d_y = random_numbers(tokens * dim, 3);
  for (const bool normalised : {false, true}) {
    const auto loss = [&](const std::vector<double>& at, const std::vector<double>& weights) {
      const std::vector<double> y = ConvolvedHead(at, weights, dim, width, normalised).y();
      return std::inner_product(y.begin(), y.end(), d_y.begin(), 0.0);
    };
    const ConvolvedHead::Gradients gradients =
        ConvolvedHead(x, w, dim, width, normalised).backward({d_y, std::vector(tokens, 0.0)});
    constexpr double step = 1e-5;
    const auto slope = [&](std::vector<double> moved, size_t i, auto of) {
      moved[i] += step;
      const double above = of(moved);
      moved[i] -= 2 * step;
      return (above - of(moved)) / (2 * step);
    };
    for (size_t i = 0; i < x.size(); ++i)
      EXPECT_NEAR(gradients.x.values[i], slope(x, i, [&](const auto& at) { return loss(at, w); }),
                  1e-8);
    for (size_t i = 0; i < w.size(); ++i)
      EXPECT_NEAR(gradients.weights[i], slope(w, i, [&](const auto& at) { return loss(x, at); }),
                  1e-8);
  }
}

TEST(RecurrenceConvolution, RowsOfAnyLength) {
  for (const int64_t count : {1, 3, 8, 16, 17, 37}) {
    const std::vector<double> z = random_numbers(count, 5);
    std::vector<float> row(z.begin(), z.end()), value(count + 1, 7.0F), slope(count + 1, 7.0F);
    row[0] = -90;  // and large numbers
    row.back() = count > 1 ? 90 : -90;
    silu_row(row.data(), count, value.data(), slope.data());
    for (int64_t i = 0; i < count; ++i) {
      const double at = row[i], sigmoid = 1 / (1 + std::exp(-at));
      EXPECT_NEAR(value[i], silu(at), 4e-7 * std::max(1.0, std::abs(at))) << i;
      EXPECT_NEAR(slope[i], sigmoid * (1 + at * (1 - sigmoid)), 1e-6) << i;
    }
    EXPECT_EQ(value.back(), 7.0F);
    EXPECT_EQ(slope.back(), 7.0F);
  }
}

/// Arrays of one part of a document, and a kernel with random weights.
struct Convolved {
  Convolved(const RecurrenceShape& shape_, DType type, int64_t tokens_, int threads)
      : shape(shape_),
        tokens(tokens_),
        layer(shape, type, tokens),
        inner(shape, DType::f32, tokens),
        kernel(shape, threads) {
    kernel.set_weights(random_weights(shape, test::recurrence_seed));
    for (int64_t t = 0; t < tokens; ++t) layer.fill(shape, type, t, t);
  }
  ConvolutionPart part(int64_t begin, int64_t count) {
    using Array = RecurrenceArray;
    ConvolutionPart part;
    for (size_t i = 0; i < convolved_arrays.size(); ++i) {
      const Array of = convolved_arrays[i], d = std::array{Array::d_q, Array::d_k, Array::d_v}[i];
      part.x[i] = layer.data[of].rows_from(begin, count);
      part.d_x[i] = layer.data[d].rows_from(begin, count);
      part.y[i] = inner.data[of].rows_from(begin, count);
      part.d_y[i] = inner.data[d].rows_from(begin, count);
    }
    return part;
  }
  RecurrenceShape shape;
  int64_t tokens;
  test::RecurrenceArrays layer, inner;
  CpuConvolutionKernel kernel;
};

// A layer on one rank is one part of each document.
TEST(RecurrenceConvolution, TheKernelAgreesWithTheDefinition) {
  for (const char* kind : {"gdn", "gla"})
    for (const DType type : {DType::f32, DType::bf16})
      for (const int64_t width : {1, 4, 70})
        for (const int64_t tokens : {1, 3, 65, 150}) {
          RecurrenceShape shape(test::named(recurrence_kinds(), kind), 2, 4, 12, 5);
          shape.convolution = width;
          Convolved run(shape, type, tokens, 2);
          RecurrenceData data = run.layer.data;
          for (const RecurrenceArray array :
               {RecurrenceArray::q, RecurrenceArray::k, RecurrenceArray::v, RecurrenceArray::d_q,
                RecurrenceArray::d_k, RecurrenceArray::d_v})
            data[array] = run.inner.data[array];
          CpuRecurrenceKernel kernel(shape, 2);
          run.kernel.forward(run.part(0, tokens));
          kernel.forward(data, {0, tokens}, {});
          kernel.backward(data, {0, tokens}, {});
          run.kernel.clear_weight_gradients();
          run.kernel.slopes(run.part(0, tokens));
          run.kernel.backward(run.part(0, tokens));
          std::vector<float> d_weights(shape.channels() * width);
          run.kernel.weight_gradients(0, d_weights);
          std::vector<test::RecurrenceRow> rows;
          for (int64_t t = 0; t < tokens; ++t) rows.push_back({t, t});
          test::RecurrenceErrors errors(shape, type, {tokens, 0});
          errors.compare(run.layer.data, {0, tokens}, rows, true);
          errors.compare_weights(d_weights, {{0, tokens}});
          EXPECT_LT(errors.worst(), 1) << kind << ' ' << name_of(type) << ' ' << tokens
                                       << " tokens, width " << width << ": " << errors.text();
        }
}

// A document that is cut, with histories and their gradients, is the whole document.
TEST(RecurrenceConvolution, PartsGoOnFromTheirHistories) {
  constexpr int64_t tokens = 40, cut = 3, width = 6;
  RecurrenceShape shape(test::named(recurrence_kinds(), "gdn"), 1, 2, 8, 5);
  shape.convolution = width;
  Convolved whole(shape, DType::f32, tokens, 1), parts(shape, DType::f32, tokens, 1);
  using Array = RecurrenceArray;
  constexpr std::array gradients = {Array::d_q, Array::d_k, Array::d_v};
  for (Convolved* one : {&whole, &parts})
    for (const Array d : gradients)
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t c = 0; c < one->inner.data[d].cols; ++c)
          one->inner.data[d].as<float>()(t, c) = static_cast<float>(std::sin(t + 3 * c));
  ConvolutionPart all = whole.part(0, tokens), first = parts.part(0, cut),
                  second = parts.part(cut, tokens - cut);
  std::vector<std::vector<float>> sums;
  for (size_t i = 0; i < convolved_arrays.size(); ++i) {
    second.history[i] = parts.layer.data[convolved_arrays[i]].rows_from(0, cut);
    const int64_t columns = second.x[i].cols;
    sums.emplace_back(cut * columns);
    second.d_history[i] = first.added[i] = MatrixView<float>(sums.back().data(), cut, columns);
  }
  whole.kernel.forward(all);
  for (const ConvolutionPart* part : {&second, &first}) parts.kernel.forward(*part);
  for (const Array of : convolved_arrays)
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t c = 0; c < whole.inner.data[of].cols; ++c)
        EXPECT_EQ(whole.inner.data[of].at(t, c), parts.inner.data[of].at(t, c));
  whole.kernel.slopes(all);
  whole.kernel.backward(all);
  for (const ConvolutionPart* part : {&first, &second}) parts.kernel.slopes(*part);
  for (const ConvolutionPart* part : {&first, &second}) parts.kernel.backward(*part);
  for (const Array d : gradients)
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t c = 0; c < whole.layer.data[d].cols; ++c)
        EXPECT_NEAR(whole.layer.data[d].at(t, c), parts.layer.data[d].at(t, c), 2e-5)
            << name_of(d) << ' ' << t;
  std::vector<float> want(shape.channels() * width), got(want.size());
  whole.kernel.weight_gradients(0, want);
  parts.kernel.weight_gradients(0, got);
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-4);
}

}  // namespace GYRE_FILE
}  // namespace gyre
