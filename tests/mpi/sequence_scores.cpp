// Predictions of sequences over context-parallel ranks, and from logits to gradients over grids of
// context-parallel and tensor-parallel ranks.

#include "logprobs/sequence_scores.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "comm/process_grid.hpp"
#include "errors.hpp"
#include "layout_cases.hpp"
#include "logprob_cases.hpp"
#include "logprobs/filtered_scores.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_parallel.hpp"
#include "report/tolerance.hpp"
#include "sharding/local_batch.hpp"
#include "sharding/transfer.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::Bounds;
using test::bounds_of;
using test::full_bounds;
using test::LogitRows;
using test::world;
using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

// Gathering

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
  const Floats grad(static_cast<size_t>(2 * 20 * 2), 1.0F);
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
        const auto i = static_cast<size_t>(segments[static_cast<size_t>(slot)]);
        const int64_t p = slot - shape.bounds[i];
        if (p < shape.width && slot + 1 < shape.bounds[i + 1])
          g = d[(i * static_cast<size_t>(shape.width) + static_cast<size_t>(p)) *
                    static_cast<size_t>(shape.row) +
                static_cast<size_t>(k)];
      }
      grad.push_back(g);
    }
  return grad;
}

TEST(GatherPredictionsBackward, SplitsOrSumsWhatTheRanksHave) {
  const int n = world().size();
  for (const auto& [bounds, layout] : layouts(mixed_lengths)) {
    const PredictionShape shape{bounds.padded, 9, 2};
    const auto count = static_cast<size_t>(shape.segments() * 9 * 2);
    Floats d(count), mine(count), all(count);
    for (size_t i = 0; i < count; ++i) {
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

// From logits to gradients

std::vector<GridShape> grids() {
  std::vector<GridShape> shapes;
  for (int tp = 1; tp <= world().size(); ++tp)
    if (world().size() % tp == 0) shapes.push_back({1, world().size() / tp, tp});
  return shapes;
}

/// A stream and the logits of all its slots. Ranks hold their slots and columns.
struct LogitStream {
  Bounds bounds;
  Ints tokens;  ///< [slots]
  LogitRows logits;
};

LogitStream make_stream(const Bounds& bounds, int64_t vocab, int32_t max_id, int32_t padding) {
  LogitStream s{bounds, {}, test::random_logits(bounds.view().slots(), vocab, DType::f32)};
  s.tokens.assign(static_cast<size_t>(bounds.view().slots()), padding);
  for (int64_t i = 0; i < bounds.view().segments(); ++i)
    for (int64_t p = 0; p < bounds.view().real_length(i); ++p)
      s.tokens[static_cast<size_t>(bounds.view().begin(i) + p)] = static_cast<int32_t>(
          token_bits({7, TokenTensor::ids}, 1000 * i + p, 0) % static_cast<uint64_t>(max_id));
  return s;
}

/// The same with targets among the largest logits, so that a filter keeps most of them.
LogitStream make_likely_stream(const Bounds& bounds, int64_t vocab) {
  LogitStream s = make_stream(bounds, vocab, 1, 0);
  for (size_t slot = 0; slot + 1 < s.tokens.size(); ++slot)
    s.tokens[slot + 1] =
        top_k_reference(s.logits.row(static_cast<int64_t>(slot)), 10)[slot * 7 % 10].id;
  return s;
}

/// One rank's way from logits to predictions and back.
class Pipeline {
 public:
  Pipeline(const LogitStream& stream, const Layout& layout, ProcessGrid& grid,
           const VocabPartition& vocab, int64_t width, const SamplingFilter& filter = {})
      : stream_(stream),
        layout_(layout),
        grid_(grid),
        vocab_(vocab),
        shape_{stream.bounds.padded, width},
        segments_(segment_ids(stream.bounds.padded)),
        slots_(layout.shard(grid.cp_rank()).slots),
        logits_(slots_, vocab.columns(grid.tp_rank()), DType::f32),
        filter_(filter) {
    if (filter.active())
      filtered_ = std::make_unique<FilteredScores>(slots_, vocab, DType::f32,
                                                   FilterOptions{filter, 16, 1}, grid.tp());
    else
      scores_ = std::make_unique<VocabScores>(slots_, vocab, ScoreOptions{}, grid.tp());
    const Ints index = shard_index(layout, grid.cp_rank());
    for (int64_t t = 0; t < slots_; ++t) {
      if (index[static_cast<size_t>(t)] >= layout.stream_slots) continue;
      const auto row = stream.logits.row(index[static_cast<size_t>(t)]);
      for (int64_t c = 0; c < vocab.valid(grid.tp_rank()); ++c)
        logits_.set(t, c, row[static_cast<size_t>(vocab.begin(grid.tp_rank()) + c)]);
    }
  }

  /// [segments, width]
  Floats forward(const Ints& targets) {
    targets_ = targets;
    Floats local(targets.size());
    HostStream host;
    if (filtered_)
      filtered_->forward(std::as_const(logits_).ref(), targets, host, local);
    else
      scores_->forward(std::as_const(logits_).ref(), targets, host, local, {});
    return gather_predictions(layout_, shape_, local, grid_.cp());
  }
  Floats forward() {
    return forward(
        next_token_targets(layout_, stream_.bounds.padded, stream_.tokens, grid_.cp_rank()));
  }
  /// Local gradient of the logits, compared with that of the reference for g [segments, width].
  void expect_gradient(const Floats& d, GatherGradient convention, const Doubles& g) {
    const Floats local = gather_predictions_backward(layout_, shape_, d, grid_.cp(), convention);
    test::Matrix got(slots_, logits_.cols(), DType::f32);
    if (filtered_)
      filtered_->backward(std::as_const(logits_).ref(), targets_, local, got.ref());
    else
      scores_->backward(std::as_const(logits_).ref(), targets_, local, {}, got.ref());
    const Ints index = shard_index(layout_, grid_.cp_rank());
    for (int64_t t = 0; t < slots_; ++t) expect_row(got, t, index[static_cast<size_t>(t)], g);
  }

 private:
  void expect_row(const test::Matrix& got, int64_t t, int64_t slot, const Doubles& g) {
    double g_of_slot = 0;
    int32_t target = 0;
    Doubles expected(static_cast<size_t>(vocab_.vocab_size), 0), logprobs = expected;
    if (slot < layout_.stream_slots) {
      const auto i = static_cast<size_t>(segments_[static_cast<size_t>(slot)]);
      const int64_t p = slot - shape_.bounds[i];
      if (p < shape_.predictions(static_cast<int64_t>(i))) {
        g_of_slot = g[i * static_cast<size_t>(shape_.width) + static_cast<size_t>(p)];
        target = stream_.tokens[static_cast<size_t>(slot) + 1];
      }
      const auto row = stream_.logits.row(slot);
      if (g_of_slot != 0) {
        expected = gradient_reference(row, target, g_of_slot);
        logprobs = log_softmax_reference(survivors(row));
      }
    }
    double worst = 0;
    for (int64_t c = 0; c < got.cols(); ++c) {
      const int64_t id = vocab_.begin(grid_.tp_rank()) + c;
      const bool valid = id < vocab_.vocab_size;
      const auto at = static_cast<size_t>(id);
      const double want = valid ? expected[at] : 0;
      // A loss of log-probabilities passes their error on, once more the same.
      const double scale = valid && g_of_slot != 0
                               ? logit_gradient_scale(logprobs[at], g_of_slot, 0,
                                                      id == target ? std::abs(g_of_slot) : 0) *
                                     logprob_scale(logprobs[static_cast<size_t>(target)])
                               : 0x1p-80;
      const double share =
          std::abs(got.at(t, c) - want) / (2 * logit_gradient_tolerance(DType::f32) * scale);
      worst = std::isnan(share) ? share : std::max(worst, share);
      if (std::isnan(worst)) break;
    }
    EXPECT_LE(worst, 1) << "err/tol in slot " << slot;
  }

  Doubles gradient_reference(std::span<const double> row, int32_t target, double g) const {
    return filter_.active() ? filtered_gradient_reference(row, target, filter_, g)
                            : score_gradient_reference(row, {&target, 1}, {&g, 1}, 0);
  }
  Doubles survivors(std::span<const double> row) const {
    Doubles left(row.begin(), row.end());
    if (!filter_.active()) return left;
    const std::vector<bool> kept = filter_reference(row, filter_);
    for (size_t v = 0; v < left.size(); ++v)
      if (!kept[v]) left[v] = -std::numeric_limits<double>::infinity();
    return left;
  }

  const LogitStream& stream_;
  const Layout& layout_;
  ProcessGrid& grid_;
  VocabPartition vocab_;
  PredictionShape shape_;
  Ints segments_;  // of each slot of the stream
  int64_t slots_;
  test::Matrix logits_;
  SamplingFilter filter_;
  std::unique_ptr<VocabScores> scores_;
  std::unique_ptr<FilteredScores> filtered_;
  Ints targets_;
};

/// [segments, width] by the reference, of the stream's own tokens.
Doubles reference_predictions(const LogitStream& s, int64_t width,
                              const SamplingFilter& filter = {}) {
  const PredictionShape shape{s.bounds.padded, width};
  Doubles out(static_cast<size_t>(shape.segments() * width), 0);
  for (int64_t i = 0; i < shape.segments(); ++i)
    for (int64_t p = 0; p < shape.predictions(i); ++p) {
      const int64_t slot = s.bounds.view().begin(i) + p;
      const auto row = s.logits.row(slot);
      const int32_t target = s.tokens[static_cast<size_t>(slot) + 1];
      out[static_cast<size_t>(i * width + p)] =
          filter.active() ? filtered_logprob_reference(row, target, filter)
                          : score_row_reference(row, target).logprob;
    }
  return out;
}

void expect_logprobs(const Floats& got, const Doubles& want) {
  ASSERT_EQ(got.size(), want.size());
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isinf(want[i])) {
      EXPECT_EQ(static_cast<double>(got[i]), want[i]) << "dropped, at " << i;
      continue;
    }
    const double share = std::abs(static_cast<double>(got[i]) - want[i]) /
                         (logprob_tolerance() * logprob_scale(want[i]));
    worst = std::isnan(share) || std::isnan(worst) ? NAN : std::max(worst, share);
    if (want[i] == 0) {
      EXPECT_EQ(got[i], 0) << "beyond the sequence, at " << i;
    }
  }
  EXPECT_LE(worst, 1) << "err/tol";
}

Layout dual(const Bounds& bounds, int cp) {
  return dual_chunk_swap(bounds.view(), cp);
}

/// Slots of these lengths that dual-chunk-swap takes for any grid of the test.
std::vector<int64_t> slots_for_all(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> slots;
  for (const int64_t length : lengths) slots.push_back(round_up(length, 2 * world().size()));
  return slots;
}

TEST(SequenceScores, OfAPackEqualThoseOfEachSequenceAlone) {
  const int64_t length = 2 * world().size() * ceil_div(32, 2 * world().size());
  const LogitStream pack = make_stream(full_bounds({length, length, length, length}), 1024, 128, 0);
  for (const GridShape& shape : grids()) {
    SCOPED_TRACE(to_string(shape));
    ProcessGrid grid(world(), shape);
    const VocabPartition vocab = even_partition(1024, 1024 + shape.tp - 1024 % shape.tp, shape.tp);
    const Layout layout = dual(pack.bounds, shape.cp);
    const Floats packed = Pipeline(pack, layout, grid, vocab, length - 1).forward();
    expect_logprobs(packed, reference_predictions(pack, length - 1));
    Floats alone;
    for (int64_t i = 0; i < 4; ++i) {
      LogitStream one{full_bounds({length}), {}, LogitRows(length, 1024)};
      one.tokens.assign(pack.tokens.begin() + i * length, pack.tokens.begin() + (i + 1) * length);
      std::copy_n(pack.logits.values.begin() + i * length * 1024, length * 1024,
                  one.logits.values.begin());
      const Layout of_one = dual(one.bounds, shape.cp);
      const Floats row = Pipeline(one, of_one, grid, vocab, length - 1).forward();
      alone.insert(alone.end(), row.begin(), row.end());
    }
    EXPECT_EQ(packed, alone);
  }
}

TEST(SequenceScores, OfRawAndRolledTargetsAgreeUpToTheTrueLength) {
  const std::vector<int64_t> lengths = {24, 48, 16, 40};
  const int64_t width = 47;
  const LogitStream s = make_stream(bounds_of(lengths, slots_for_all(lengths)), 1024, 1024, 9);
  Ints rows(4 * 48, 77);
  for (size_t i = 0; i < 4; ++i)
    std::copy_n(s.tokens.begin() + s.bounds.view().begin(static_cast<int64_t>(i)), lengths[i],
                rows.begin() + static_cast<int64_t>(i) * 48);
  for (const GridShape& shape : grids()) {
    SCOPED_TRACE(to_string(shape));
    ProcessGrid grid(world(), shape);
    const Layout layout = dual(s.bounds, shape.cp);
    for (const VocabPartition& vocab : test::partitions(1024, shape.tp)) {
      Pipeline pipeline(s, layout, grid, vocab, width);
      const Floats raw = pipeline.forward();
      expect_logprobs(raw, reference_predictions(s, width));
      const Floats rolled =
          pipeline.forward(rolled_targets(layout, s.bounds.view(), rows, 48, grid.cp_rank()));
      int64_t different = 0;
      for (size_t i = 0; i < 4; ++i)
        for (size_t p = 0; p < 47; ++p) {
          const size_t at = 47 * i + p;
          if (static_cast<int64_t>(p) < lengths[i] - 1) {
            EXPECT_EQ(raw[at], rolled[at]);
          } else {
            different += raw[at] != rolled[at] ? 1 : 0;
          }
        }
      // Padding is 9 in one and 0 in the other.
      EXPECT_EQ(different > 0, s.bounds.real != s.bounds.padded);
    }
  }
}

/// Masked mean over each sequence of -advantage · exp(log p - old log p), as [segments, width]
/// gradients by log p.
Doubles policy_gradient(const LogitStream& s, const Doubles& logprobs, int64_t width) {
  Doubles g(logprobs.size(), 0);
  for (int64_t i = 0; i < s.bounds.view().segments(); ++i) {
    const int64_t count = s.bounds.view().real_length(i) - 1;
    const double advantage = i % 2 == 0 ? 0.7 : -1.3;
    for (int64_t p = 0; p < std::min(count, width); ++p) {
      const auto at = static_cast<size_t>(i * width + p);
      const double old = -6.5 + 0.01 * static_cast<double>(p % 30);
      g[at] = -advantage * std::exp(logprobs[at] - old) / static_cast<double>(count);
    }
  }
  return g;
}

void expect_policy_gradients(const LogitStream& s, int64_t width,
                             const SamplingFilter& filter = {}) {
  const int64_t vocab_size = s.logits.vocab_size;
  const Doubles want = reference_predictions(s, width, filter);
  const Doubles g = policy_gradient(s, want, width);
  for (const GridShape& shape : grids()) {
    SCOPED_TRACE(to_string(shape));
    ProcessGrid grid(world(), shape);
    const Layout layout = dual(s.bounds, shape.cp);
    Pipeline pipeline(s, layout, grid, test::partitions(vocab_size, shape.tp).back(), width,
                      filter);
    const Floats got = pipeline.forward();
    expect_logprobs(got, want);
    const Doubles own = policy_gradient(s, Doubles(got.begin(), got.end()), width);
    // All ranks compute the same loss; or each has its share of it, and they are summed.
    pipeline.expect_gradient(Floats(own.begin(), own.end()), GatherGradient::split, g);
    Floats share;
    for (const double x : own) share.push_back(static_cast<float>(x / shape.cp));
    pipeline.expect_gradient(share, GatherGradient::sum, g);
  }
}

TEST(SequenceScores, PolicyGradientsOfAPackAreThoseOfItsSequences) {
  const std::vector<int64_t> lengths = {512 / 4, 512 / 2, 512 / 3, 3 * 512 / 4};
  expect_policy_gradients(make_stream(bounds_of(lengths, slots_for_all(lengths)), 512, 512, 0),
                          511);
}

TEST(SequenceScores, FilteredPolicyGradientsOfAPackAreThoseOfItsSequences) {
  const std::vector<int64_t> lengths = {512 / 4, 512 / 2, 512 / 3, 3 * 512 / 4};
  const LogitStream s = make_likely_stream(bounds_of(lengths, slots_for_all(lengths)), 512);
  const SamplingFilter filter{8, 0.9, 1};
  const Doubles want = reference_predictions(s, 511, filter);
  const auto dropped =
      std::count_if(want.begin(), want.end(), [](double x) { return std::isinf(x); });
  EXPECT_GT(dropped, 100);  // both kinds of targets occur
  EXPECT_LT(dropped, 500);
  expect_policy_gradients(s, 511, filter);
}

TEST(SequenceScores, GradientsOfAPackAreThoseOfDenseRows) {
  const int64_t length = round_up(512, 2 * world().size());
  expect_policy_gradients(make_stream(full_bounds({length, length, length, length}), 1000, 1000, 0),
                          length - 1);
}

TEST(SequenceScores, OfOtherLayoutsAndCutSequences) {
  const std::vector<int64_t> lengths = {9, 0, 30, 1, 17};
  const LogitStream s = make_stream(full_bounds(lengths), 50, 50, 0);
  for (const GridShape& shape : grids())
    for (const char* name : {"contiguous", "striped", "balanced"}) {
      SCOPED_TRACE(to_string(shape) + " " + name);
      ProcessGrid grid(world(), shape);
      LayoutOptions options;
      options.cp = shape.cp;
      options.chunk = 3;
      const Layout layout = find_layout(name).make(s.bounds.view(), options);
      const Doubles want = reference_predictions(s, 12);
      Pipeline pipeline(s, layout, grid, balanced_partition(50, shape.tp), 12);
      expect_logprobs(pipeline.forward(), want);
      const Doubles g = policy_gradient(s, want, 12);
      pipeline.expect_gradient(Floats(g.begin(), g.end()), GatherGradient::split, g);
    }
}

TEST(SequenceScores, OfTheGoldenBatchByNumber) {
  const Doubles first = {-11.873163688, -4.450016135, -9.542737857, -2.283393937,
                         -9.837148456,  -2.401064173, -7.409641104};
  const LogitRows golden = test::golden_logits();
  for (const GridShape& shape : grids()) {
    if (8 % (2 * shape.cp) != 0) continue;
    SCOPED_TRACE(to_string(shape));
    ProcessGrid grid(world(), shape);
    const LogitStream s{full_bounds({8, 8}), test::golden_targets(), golden};
    const Layout layout = dual(s.bounds, shape.cp);
    const Floats got =
        Pipeline(s, layout, grid, test::partitions(64, shape.tp).front(), 7).forward();
    expect_logprobs(Floats(got.begin(), got.begin() + 7), first);
    double sum = 0;
    for (const float x : got) sum += static_cast<double>(x);
    EXPECT_NEAR(sum, -97.727189536, logprob_tolerance() * 97.7);
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
