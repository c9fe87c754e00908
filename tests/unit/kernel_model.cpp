// The time of kernel calls: rates between measured shapes and head dimensions, edges of masks.

#include "predict/kernel_model.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>

#include "errors.hpp"

namespace gyre {
namespace GYRE_FILE {

Rectangle rectangle(int64_t queries, int64_t keys, const Mask& mask = {}) {
  return {0, queries, 0, keys, mask};
}
Rectangle causal_square(int64_t n, int64_t window = 0) {
  return rectangle(n, n, {true, 0, 1, 1, window});
}

/// Rates of 2 x 3 shapes.
KernelSurface surface_of(Pass pass = Pass::forward, int head_dim = 64) {
  KernelSurface surface;
  surface.pass = pass;
  surface.head_dim = head_dim;
  surface.rows = {100, 400};
  surface.keys = {100, 1000, 10000};
  surface.flops_per_s = {1e9, 2e9, 3e9, 4e9, 8e9, 12e9};
  return surface;
}
/// Rates of squares of three sides.
KernelSurface squares_of(Pass pass = Pass::forward, int head_dim = 64) {
  KernelSurface surface = surface_of(pass, head_dim);
  surface.rows = {100, 400, 1600};
  surface.keys.clear();
  surface.flops_per_s = {1e9, 4e9, 5e9};
  return surface;
}

KernelModel model_of(std::vector<KernelSurface> surfaces) {
  KernelModel model;
  model.surfaces = std::move(surfaces);
  return model;
}

/// A call of 3 query heads of 64.
ModelledCall call_of(std::span<const Rectangle> rectangles, Pass pass = Pass::forward,
                     int64_t head_dim = 64) {
  ModelledCall call;
  call.pass = pass;
  call.query_heads = 3;
  call.head_dim = call.value_dim = head_dim;
  call.rectangles = rectangles;
  return call;
}

void expect_near(double actual, double expected) {
  EXPECT_NEAR(actual, expected, 1e-12 * expected);
}

TEST(KernelModel, EachRectangleOfACallHasItsOwnRate) {
  const KernelModel model = model_of({surface_of()});
  // Neighbours differ in queries, in keys, or in nothing; the last two are outside of the surface.
  const std::vector<Rectangle> all = {rectangle(100, 100),  rectangle(100, 1000),
                                      rectangle(400, 1000), rectangle(400, 1000),
                                      rectangle(400, 50),   rectangle(50, 50)};
  ModelledTime sum;
  for (const Rectangle& one : all) {
    const ModelledTime time = model.time(call_of(std::span(&one, 1)));
    sum.seconds += time.seconds;
    sum.extrapolated += time.extrapolated;
  }
  const ModelledTime together = model.time(call_of(all));
  expect_near(together.seconds, sum.seconds);
  expect_near(together.extrapolated, sum.extrapolated);
  EXPECT_GT(together.extrapolated, 0);
}

TEST(KernelSurface, MeasuredShapesHaveTheirOwnRates) {
  const KernelSurface surface = surface_of(), squares = squares_of();
  for (size_t row = 0; row < surface.rows.size(); ++row)
    for (size_t key = 0; key < surface.keys.size(); ++key) {
      const double queries = surface.rows[row], keys = surface.keys[key];
      expect_near(surface.rate(queries, keys), surface.flops_per_s[row * 3 + key]);
      EXPECT_FALSE(surface.outside(queries, keys));
    }
  for (size_t i = 0; i < squares.rows.size(); ++i) {
    expect_near(squares.rate(squares.rows[i], squares.rows[i]), squares.flops_per_s[i]);
    EXPECT_FALSE(squares.outside(squares.rows[i], squares.rows[i]));
  }
}

TEST(KernelSurface, RatesBetweenMeasuredShapesAreGeometric) {
  const KernelSurface surface = surface_of();
  // Half of the way in the logarithm of queries, of keys, of both.
  expect_near(surface.rate(200, 100), std::sqrt(1e9 * 4e9));
  expect_near(surface.rate(400, std::sqrt(1e3 * 1e4)), std::sqrt(8e9 * 12e9));
  expect_near(surface.rate(200, std::sqrt(1e2 * 1e3)), std::pow(1e9 * 2e9 * 4e9 * 8e9, 0.25));
  // A quarter of the way: 100 · 4^(1/4).
  expect_near(surface.rate(100 * std::sqrt(2), 1000), 2e9 * std::pow(8.0 / 2, 0.25));
}

TEST(KernelSurface, WithoutKeysARectangleIsASquareOfEqualArea) {
  const KernelSurface squares = squares_of();
  expect_near(squares.rate(200, 200), 2e9);
  expect_near(squares.rate(100, 400), 2e9);
  expect_near(squares.rate(800, 50), 2e9);
  EXPECT_FALSE(squares.outside(10, 1000));
  EXPECT_TRUE(squares.outside(10, 999));
}

TEST(KernelSurface, OutsideTheRateIsThatOfTheNearestShape) {
  const KernelSurface surface = surface_of(), squares = squares_of();
  expect_near(surface.rate(1, 1), 1e9);
  expect_near(surface.rate(1e6, 1e6), 12e9);
  expect_near(surface.rate(1, 1000), 2e9);
  expect_near(surface.rate(200, 1e9), std::sqrt(3e9 * 12e9));
  EXPECT_TRUE(surface.outside(99, 1000));
  EXPECT_TRUE(surface.outside(401, 1000));
  EXPECT_TRUE(surface.outside(200, 99));
  EXPECT_TRUE(surface.outside(200, 10001));
  EXPECT_FALSE(surface.outside(200, 5000));
  expect_near(squares.rate(1, 1), 1e9);
  expect_near(squares.rate(2000, 2000), 5e9);
  EXPECT_TRUE(squares.outside(1601, 1601));
}

TEST(KernelModel, WithoutSurfacesAllCallsHaveOneRate) {
  KernelModel model;
  model.flops_per_s = 1e9;
  const std::vector<Rectangle> rectangles = {rectangle(10, 20), causal_square(10)};
  ModelledCall call = call_of(rectangles, Pass::backward, 8);
  call.type = DType::bf16;
  expect_near(model.time(call).seconds, 10.0 * 8 * 3 * (200 + 55) / 1e9);
  EXPECT_EQ(model.time(call).extrapolated, 0);
  EXPECT_EQ(KernelModel().time(call).seconds, 0);
}

TEST(KernelModel, EachRectangleHasTheRateOfItsShape) {
  const KernelSurface surface = squares_of();
  const std::vector<Rectangle> rectangles = {rectangle(100, 100), rectangle(200, 200),
                                             causal_square(400)};
  const double flops = 4.0 * 64 * 3;
  expect_near(model_of({surface}).time(call_of(rectangles)).seconds,
              flops * (100.0 * 100 / 1e9 + 200.0 * 200 / 2e9 + 400.0 * 401 / 2 / 4e9));
}

TEST(KernelModel, ACallIsLaunchedOnce) {
  KernelSurface surface = squares_of();
  const std::vector<Rectangle> one = {rectangle(100, 100)};
  const std::vector<Rectangle> several(5, one[0]);
  const double without = model_of({surface}).time(call_of(several)).seconds;
  surface.launch_s = 1e-3;
  expect_near(model_of({surface}).time(call_of(several)).seconds, 1e-3 + without);
  expect_near(model_of({surface}).time(call_of(one)).seconds, 1e-3 + without / 5);
  expect_near(model_of({surface}).time(call_of({})).seconds, 1e-3);
}

TEST(KernelModel, MergingTakesTheSameForAllShapes) {
  KernelSurface surface = squares_of();
  const std::vector<Rectangle> inside = {rectangle(100, 100)};
  for (const int64_t head_dim : {64, 96}) {  // of the surface, and another one
    ModelledCall call = call_of(inside);
    call.head_dim = call.value_dim = head_dim;
    surface.merge_s = 1e-6;
    EXPECT_TRUE(model_of({surface}).merges());
    const double without = model_of({surface}).time(call).seconds;
    call.merged = 3000;
    expect_near(model_of({surface}).time(call).seconds, without + 3e-3);
    surface.merge_s = 0;
    EXPECT_FALSE(model_of({surface}).merges());
    expect_near(model_of({surface}).time(call).seconds, without);
  }
}

TEST(KernelModel, ValuesOfAnotherWidthCountByTheirProducts) {
  const std::vector<Rectangle> rectangles = {rectangle(100, 100)};
  for (const auto& [pass, elements] :
       {std::pair{Pass::forward, 192 + 128}, {Pass::backward, 3 * 192 + 2 * 128}}) {
    ModelledCall call = call_of(rectangles, pass, 192);
    call.value_dim = 128;
    const double flops = 2.0 * elements * 3 * 100 * 100;
    expect_near(kernel_flops(call), flops);
    for (const int narrow : {64, 128})
      expect_near(model_of({squares_of(pass, narrow), squares_of(pass, 256)}).time(call).seconds,
                  flops / 1e9);
  }
}

TEST(KernelModel, AMasksEdgeCostsExtra) {
  KernelSurface surface = squares_of();
  surface.diagonal_s = 1e-6;
  const KernelModel model = model_of({surface});
  const double flops = 4.0 * 64 * 3;
  const std::vector<Rectangle> causal = {causal_square(400)}, full = {rectangle(400, 400)};
  const std::vector<Rectangle> window = {causal_square(400, 100)};
  expect_near(model.time(call_of(full)).seconds, flops * 400 * 400 / 4e9);
  expect_near(model.time(call_of(causal)).seconds,
              flops * (400.0 * 401 / 2) / 4e9 + 3 * 399 * 1e-6);
  // Rows end before the last key 399 times, and begin behind the first one 300 times.
  expect_near(model.time(call_of(window)).seconds,
              flops * (100.0 * 101 / 2 + 300.0 * 100) / 4e9 + 3 * (399 + 300) * 1e-6);
}

TEST(KernelModel, GradientsTakeTheirShareOfTheProducts) {
  KernelSurface surface = squares_of(Pass::backward);
  surface.diagonal_s = 1e-6;
  const KernelModel model = model_of({surface});
  const std::vector<Rectangle> rectangles = {causal_square(400)};
  ModelledCall call = call_of(rectangles, Pass::backward);
  const double both = model.time(call).seconds;
  expect_near(both, 10.0 * 64 * 3 * (400.0 * 401 / 2) / 4e9 + 3 * 399 * 1e-6);
  expect_near(kernel_flops(call), 10.0 * 64 * 3 * (400.0 * 401 / 2));
  call.d_kv = false;
  expect_near(model.time(call).seconds, both * 3 / 5);
  expect_near(kernel_flops(call), 6.0 * 64 * 3 * (400.0 * 401 / 2));
  call.d_kv = true;
  call.d_q = false;
  expect_near(model.time(call).seconds, both * 4 / 5);
  expect_near(kernel_flops(call), 8.0 * 64 * 3 * (400.0 * 401 / 2));
}

TEST(KernelModel, SecondsOutsideOfTheSurfaceAreCounted) {
  KernelSurface surface = squares_of();
  surface.launch_s = 1e-3;
  const KernelModel model = model_of({surface});
  const std::vector<Rectangle> inside = {rectangle(100, 100), rectangle(1600, 1600)};
  EXPECT_EQ(model.time(call_of(inside)).extrapolated, 0);
  const std::vector<Rectangle> some = {rectangle(100, 100), rectangle(10, 10)};
  expect_near(model.time(call_of(some)).extrapolated, 4.0 * 64 * 3 * 100 / 1e9);
}

TEST(KernelModel, TimesBetweenHeadDimensionsAreLinear) {
  KernelSurface wide = squares_of(Pass::forward, 128);
  wide.flops_per_s = {2e9, 8e9, 10e9};
  wide.launch_s = 1e-3;
  const KernelModel model = model_of({wide, squares_of()});
  const std::vector<Rectangle> rectangles = {rectangle(400, 400), rectangle(10, 10)};
  const auto time = [&](int64_t head_dim) {
    return model.time(call_of(rectangles, Pass::forward, head_dim));
  };
  const double pairs = 3.0 * 4 * 400 * 400, few = 3.0 * 4 * 100;
  expect_near(time(64).seconds, pairs * 64 / 4e9 + few * 64 / 1e9);
  expect_near(time(128).seconds, 1e-3 + pairs * 128 / 8e9 + few * 128 / 2e9);
  expect_near(time(80).seconds, 0.75 * time(64).seconds + 0.25 * time(128).seconds);
  expect_near(time(64).extrapolated, few * 64 / 1e9);
  expect_near(time(80).extrapolated, 0.75 * few * 64 / 1e9 + 0.25 * few * 128 / 2e9);
}

TEST(KernelModel, OtherHeadDimensionsHaveTheRateOfTheNearestAndAreExtrapolated) {
  KernelSurface narrow = squares_of();
  narrow.launch_s = 1e-3;
  const KernelModel model = model_of({narrow, squares_of(Pass::forward, 128)});
  const std::vector<Rectangle> rectangles = {rectangle(400, 400)};
  const ModelledTime below = model.time(call_of(rectangles, Pass::forward, 32));
  expect_near(below.seconds, 1e-3 + 4.0 * 32 * 3 * 400 * 400 / 4e9);
  EXPECT_EQ(below.extrapolated, below.seconds);
  const ModelledTime above = model.time(call_of(rectangles, Pass::forward, 256));
  expect_near(above.seconds, 4.0 * 256 * 3 * 400 * 400 / 4e9);
  EXPECT_EQ(above.extrapolated, above.seconds);
}

TEST(KernelModel, SaysWhatItHasNoSurfaceOf) {
  KernelSurface backward = squares_of(Pass::backward), bf16 = squares_of(Pass::forward, 128);
  bf16.type = DType::bf16;
  const KernelModel model = model_of({backward, squares_of(Pass::backward, 128), bf16});
  EXPECT_EQ(KernelModel().why_not(Pass::forward, DType::f32), "");
  EXPECT_EQ(model.why_not(Pass::backward, DType::f32), "");
  EXPECT_EQ(model.why_not(Pass::forward, DType::bf16), "");
  EXPECT_EQ(model.why_not(Pass::forward, DType::f32),
            "no kernel of f32 fwd; the machine has bf16 fwd, f32 bwd");
  EXPECT_EQ(model.why_not(Pass::backward, DType::bf16),
            "no kernel of bf16 bwd; the machine has bf16 fwd, f32 bwd");
  test::expect_usage("no kernel of f32 fwd; the machine has bf16 fwd, f32 bwd",
                     [&] { model.time(call_of({})); });
}

RC_GTEST_PROP(MaskEdge, CountsRowsThatEndOrBeginInside, ()) {
  Mask mask;
  mask.causal = *rc::gen::weightedElement<bool>({{9, true}, {1, false}});
  mask.offset = *rc::gen::inRange<int64_t>(-60, 100);
  mask.q_stride = *rc::gen::inRange<int64_t>(1, 6);
  mask.k_stride = *rc::gen::inRange<int64_t>(1, 6);
  mask.window = *rc::gen::inRange<int64_t>(0, 40);
  const Rectangle r =
      rectangle(*rc::gen::inRange<int64_t>(1, 40), *rc::gen::inRange<int64_t>(1, 40), mask);
  int64_t edge = 0;
  for (int64_t i = 0; i < r.q_length; ++i) {
    edge += mask.end_key(i) > 0 && mask.end_key(i) < r.k_length ? 1 : 0;
    edge += mask.begin_key(i) > 0 && mask.begin_key(i) < r.k_length ? 1 : 0;
  }
  RC_ASSERT(mask_edge(r) == edge);
}

}  // namespace GYRE_FILE
}  // namespace gyre
