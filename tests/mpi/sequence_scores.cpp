// Predictions of sequences over context-parallel ranks. logprobs_grids.cpp: from logits to them and
// back.

#include "logprobs/sequence_scores.hpp"

#include <limits>

#include "errors.hpp"
#include "layout_cases.hpp"
#include "sharding/local_batch.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::Bounds;
using test::bounds_of;
using test::full_bounds;
using test::world;
using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

/// Layouts of all kinds for the ranks of the test, and some boundaries they can be made of.
std::vector<std::pair<Bounds, Layout>> layouts(const std::vector<int64_t>& lengths) {
  std::vector<std::pair<Bounds, Layout>> result;
  for (const LayoutKind& kind : layout_kinds()) {
    LayoutOptions options;
    options.cp = world().size();
    options.chunk = 2;
    std::vector<int64_t> slots;
    for (const int64_t length : lengths)
      slots.push_back(round_up(length, kind.segment_multiple(options.cp)));
    const Bounds bounds = bounds_of(lengths, slots);
    result.emplace_back(bounds, kind.make(bounds.view(), options));
  }
  return result;
}

/// The value of element k of a slot: different everywhere, exact.
float value_of(int64_t slot, int64_t k) {
  return static_cast<float>(1 + 8 * slot + k);
}

/// local [slots, row]; what lies past the stream is NaN.
Floats local_values(const Layout& layout, int rank, int64_t row) {
  Floats local;
  for (const int32_t slot : shard_index(layout, rank))
    for (int64_t k = 0; k < row; ++k)
      local.push_back(slot < layout.stream_slots ? value_of(slot, k)
                                                 : std::numeric_limits<float>::quiet_NaN());
  return local;
}

Floats expected_predictions(const Ints& bounds, int64_t width, int64_t row) {
  Floats out;
  for (size_t i = 0; i + 1 < bounds.size(); ++i)
    for (int64_t p = 0; p < width; ++p)
      for (int64_t k = 0; k < row; ++k)
        out.push_back(bounds[i] + p + 1 < bounds[i + 1] ? value_of(bounds[i] + p, k) : 0.0F);
  return out;
}

const std::vector<int64_t> mixed_lengths = {5, 0, 1, 12, 30, 2, 0};

TEST(GatherPredictions, GivesOneRowASequenceFromAnyLayout) {
  for (const auto& [bounds, layout] : layouts(mixed_lengths))
    for (const int64_t width : {0, 1, 7, 40})
      for (const int64_t row : {1, 3}) {
        SCOPED_TRACE(layout.name + ", width " + std::to_string(width));
        EXPECT_EQ(gather_predictions(layout, {bounds.padded, width, row},
                                     local_values(layout, world().rank(), row), world()),
                  expected_predictions(bounds.padded, width, row));
      }
}

TEST(GatherPredictions, OfMoreThanAHundredSequences) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 150; ++i) lengths.push_back((i * 7) % 5);
  for (const auto& [bounds, layout] : layouts(lengths))
    EXPECT_EQ(gather_predictions(layout, {bounds.padded, 3},
                                 local_values(layout, world().rank(), 1), world()),
              expected_predictions(bounds.padded, 3, 1));
}

TEST(GatherPredictions, OfSequencesOfOneTokenAreNone) {
  for (const auto& [bounds, layout] : layouts({1, 1, 1})) {
    const auto local = local_values(layout, world().rank(), 1);
    EXPECT_EQ(gather_predictions(layout, {bounds.padded, 0}, local, world()), Floats{});
  }
}

TEST(GatherPredictions, MovesEachSlotOnceBehindOneAgreement) {
  const int n = world().size();
  const Bounds bounds = full_bounds({6 * n, 4 * n});
  const Layout layout = dual_chunk_swap(bounds.view(), n);
  const PredictionShape shape{bounds.padded, 20, 2};
  const auto sent = [&](const auto& work) {
    const Traffic before = world().traffic();
    work();
    return std::pair(world().traffic().messages - before.messages,
                     world().traffic().bytes_sent - before.bytes_sent);
  };
  const auto agreement = sent([&] {
    agree_on_arguments(world(), "x", [] {}, {{"a", 1}, {"b", 1}, {"c", 1}, {"d", 1}, {"e", 1}});
  });
  const auto gather = sent(
      [&] { gather_predictions(layout, shape, local_values(layout, world().rank(), 2), world()); });
  EXPECT_EQ(gather.first - agreement.first, n > 1 ? 1 : 0);
  EXPECT_EQ(gather.second - agreement.second, (n - 1) * 10 * 2 * 4);
  const Floats grad(2 * 20 * 2, 1.0F);
  for (const GatherGradient convention :
       {GatherGradient::split, GatherGradient::none, GatherGradient::sum}) {
    const auto back =
        sent([&] { gather_predictions_backward(layout, shape, grad, world(), convention); });
    const bool moves = n > 1 && convention == GatherGradient::sum;
    EXPECT_EQ(back.first - agreement.first, moves ? 1 : 0);
    EXPECT_EQ(back.second - agreement.second, moves ? (n - 1) * 10 * 2 * 4 : 0);
  }
}

/// The gradient by definition: of each slot that has a prediction, that one's.
Floats expected_gradient(const Layout& layout, const PredictionShape& shape, const Floats& d) {
  Floats grad;
  const Ints segments = segment_ids(shape.bounds);
  for (const int32_t slot : shard_index(layout, world().rank()))
    for (int64_t k = 0; k < shape.row; ++k) {
      float g = 0;
      if (slot < layout.stream_slots) {
        const int64_t i = segments[slot];
        const int64_t p = slot - shape.bounds[i];
        if (p < shape.width && slot + 1 < shape.bounds[i + 1])
          g = d[(i * shape.width + p) * shape.row + k];
      }
      grad.push_back(g);
    }
  return grad;
}

TEST(GatherPredictionsBackward, SplitsOrSumsWhatTheRanksHave) {
  const int n = world().size();
  for (const auto& [bounds, layout] : layouts(mixed_lengths)) {
    const PredictionShape shape{bounds.padded, 9, 2};
    const int64_t count = shape.segments() * 9 * 2;
    Floats d(count), mine(count), all(count);
    for (int64_t i = 0; i < count; ++i) {
      d[i] = static_cast<float>(i) + 1;
      mine[i] = d[i] * static_cast<float>(world().rank() + 1);
      all[i] = d[i] * static_cast<float>(n * (n + 1) / 2);
    }
    EXPECT_EQ(gather_predictions_backward(layout, shape, d, world(), GatherGradient::split),
              expected_gradient(layout, shape, d));
    EXPECT_EQ(gather_predictions_backward(layout, shape, mine, world(), GatherGradient::sum),
              expected_gradient(layout, shape, all));
    EXPECT_EQ(gather_predictions_backward(layout, shape, d, world(), GatherGradient::none),
              Floats(local_values(layout, 0, 2).size(), 0.0F));
  }
}

TEST(GatherPredictions, ErrorsAreTheSameOnAllRanks) {
  const int n = world().size(), me = world().rank();
  const Bounds bounds = full_bounds({2 * n});
  const Layout layout = dual_chunk_swap(bounds.view(), n),
               larger = dual_chunk_swap(full_bounds({2 * n + 2}).view(), n + 1);
  const Floats local(2, 1.0F);
  const auto gather = [&](const Layout& l, const PredictionShape& shape, const Floats& values) {
    return agreed_message([&] { gather_predictions(l, shape, values, world()); });
  };
  EXPECT_EQ(gather(larger, {bounds.padded, 3}, local),
            fmt::format("layout dual-chunk-swap is for {} ranks, but the group has {}", n + 1, n));
  EXPECT_EQ(gather(layout, {bounds.padded, 3}, Floats(3, 1.0F)),
            "gathering predictions: 3 elements, but 2 slots x 1 values are 2");
  EXPECT_EQ(gather(layout, {bounds.padded, 3, 0}, {}),
            "gathering predictions: 0 values each; at least 1");
  EXPECT_EQ(gather(layout, {bounds.padded, -1}, local),
            "gathering predictions: rows of -1; at least 0");
  const Ints backwards = {0, 2 * n + 1, 2 * n};
  EXPECT_EQ(gather(layout, {backwards, 3}, local),
            fmt::format("segment 1: ends at slot {}, before its begin {}", 2 * n, 2 * n + 1));
  EXPECT_EQ(agreed_message([&] {
              gather_predictions_backward(layout, {bounds.padded, 3}, Floats(4, 0.0F), world(),
                                          GatherGradient::split);
            }),
            "gradient of predictions: 4 elements, but 1 sequences x 3 x 1 values are 3");
  if (n == 1) return;
  EXPECT_EQ(gather(layout, {bounds.padded, me == 1 ? 4 : 3}, local),
            "gathering predictions: the width is 3 on rank 0, but 4 on rank 1; it must be the same "
            "on all ranks of the group");
  EXPECT_EQ(agreed_message([&] {
              gather_predictions_backward(layout, {bounds.padded, 3}, Floats(3, 0.0F), world(),
                                          me == 1 ? GatherGradient::sum : GatherGradient::split);
            }),
            "gradient of predictions: the gradient convention is 0 on rank 0, but 1 on rank 1; it "
            "must be the same on all ranks of the group");
}

}  // namespace GYRE_FILE
}  // namespace gyre
