// Utterances of text and audio over all ranks: encoded together, packed, sharded, and their loss.

#include <algorithm>
#include <cmath>
#include <functional>

#include "comm/agree.hpp"
#include "core/index.hpp"
#include "mpi_test.hpp"
#include "packing/salm.hpp"
#include "sharding/distributed.hpp"
#include "sharding/encoder_work.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::world;
using Longs = std::vector<int64_t>;
using Values = std::vector<float>;
using Items = std::vector<Values>;

constexpr int64_t pad = 0, audio_id = 99, none = -100, hidden = 2;

/// Three rows, the second padded on the left, with four items of audio.
struct Case {
  Longs ids = {7, audio_id, 1, 2, audio_id, 1, 0, 0, 3, audio_id, 4, 5, 6, 2, 3, 4, audio_id, 8};
  Longs targets = {none, none, none, none, none, 1, none, none, none,
                   none, 4,    5,    none, 2,    3, 4,    none, 8};
  Longs lengths = {8, 6, 4, 7};
  Values samples, text;
  Case() {
    for (size_t i = 0; i < lengths.size() * 8; ++i)
      samples.push_back(static_cast<int64_t>(i % 8) < lengths[i / 8]
                            ? 0.25f * static_cast<float>(i % 7) - 0.5f
                            : 0.0f);
    for (size_t i = 0; i < ids.size() * hidden; ++i)
      text.push_back(0.125f * static_cast<float>(i % 11) - 0.5f);
  }
  AudioBatch audio() const { return {{samples.data(), std::ssize(lengths), 8}, lengths}; }
};

/// A frame for every two samples, linear in `scale`.
AudioEncoder encoder(float scale) {
  return [scale](std::span<const float> samples, int64_t length) {
    Values frames;
    for (size_t f = 0; f < static_cast<size_t>(length) / 2; ++f) {
      frames.push_back(scale * samples[2 * f]);
      frames.push_back(scale * (samples[2 * f + 1] + 1));
    }
    return frames;
  };
}

SalmPacked pack(const Case& c, const Items& encodings, int cp) {
  std::vector<MatrixView<const float>> audio;
  for (const Values& encoding : encodings)
    audio.emplace_back(encoding.data(), std::ssize(encoding) / hidden, hidden);
  return pack_salm({3, hidden, c.ids, c.text, c.targets, audio}, {pad, audio_id, cp, 1});
}

/// Rows of one rank may be odd, which dual-chunk-swap does not cut.
Layout layout_of(const SalmPacked& packed) {
  const int n = world().size();
  return n == 1 ? contiguous(packed.bounds(), {}) : dual_chunk_swap(packed.bounds(), n);
}

/// A loss of one slot, and its gradient with respect to the embedding.
double loss_of(const float* x, int64_t label) {
  return std::cos(static_cast<double>(x[0]) + 0.1 * static_cast<double>(label)) +
         static_cast<double>(x[1] * x[1]);
}
std::pair<double, double> gradient_of(const float* x, int64_t label) {
  return {-std::sin(static_cast<double>(x[0]) + 0.1 * static_cast<double>(label)),
          2 * static_cast<double>(x[1])};
}

struct Sums {
  double loss = 0;
  double labels = 0;
};
Sums sums_of(const Values& embeddings, const Longs& labels) {
  Sums sums;
  for (size_t t = 0; t < labels.size(); ++t)
    if (labels[t] != none) {
      sums.loss += loss_of(&embeddings[hidden * t], labels[t]);
      ++sums.labels;
    }
  return sums;
}

/// The mean over all labels: both sums over ranks come before the division, for some ranks have no
/// label, and means of ranks would weigh unequal numbers alike.
double mean_over_ranks(const Sums& mine) {
  return all_reduce_value(world(), mine.loss, ReduceOp::sum) /
         all_reduce_value(world(), mine.labels, ReduceOp::sum);
}

double mean_loss(const Case& c, float scale) {
  const Items encodings = encode_distributed(world(), c.audio(), encoder(scale), {hidden});
  const SalmPacked packed = pack(c, encodings, world().size());
  const Layout layout = layout_of(packed);
  const SalmShard mine = shard_salm(packed, layout, world().rank());
  return mean_over_ranks(sums_of(mine.embeddings, mine.labels));
}

TEST(SalmOverRanks, ShardsGatherToThePackedStream) {
  const Case c;
  const Items encodings = encode_distributed(world(), c.audio(), encoder(1), {hidden});
  const SalmPacked packed = pack(c, encodings, world().size());
  const Layout layout = layout_of(packed);
  const SalmShard mine = shard_salm(packed, layout, world().rank());
  EXPECT_EQ(gather_stream<float>(layout, world(), mine.embeddings, hidden), packed.embeddings);
  EXPECT_EQ(gather_stream<int64_t>(layout, world(), mine.labels), packed.labels);
  EXPECT_EQ(gather_stream<int64_t>(layout, world(), mine.positions), packed.positions);
}

TEST(SalmOverRanks, TheLossIsThatOfOneRank) {
  const Case c;
  Items encodings;
  for (size_t i = 0; i < c.lengths.size(); ++i)
    encodings.push_back(encoder(1)({&c.samples[8 * i], 8}, c.lengths[i]));
  const SalmPacked whole = pack(c, encodings, 1);
  const Sums sums = sums_of(whole.embeddings, whole.labels);
  EXPECT_EQ(sums.labels, 7);
  EXPECT_NEAR(mean_loss(c, 1), sums.loss / sums.labels, 1e-12);
}

TEST(SalmOverRanks, TheGradientReachesTheEncoder) {
  const Case c;
  const int n = world().size(), me = world().rank();
  const double step = 1.0 / 64;
  const double expected =
      (mean_loss(c, 1 + static_cast<float>(step)) - mean_loss(c, 1 - static_cast<float>(step))) /
      (2 * step);
  const Items encodings = encode_distributed(world(), c.audio(), encoder(1), {hidden});
  const SalmPacked packed = pack(c, encodings, n);
  const Layout layout = layout_of(packed);
  const SalmShard mine = shard_salm(packed, layout, me);
  // Where frames lie: pack numbers instead of frames, and text as 0.
  Items numbers;
  Case numbered = c;
  std::fill(numbered.text.begin(), numbered.text.end(), 0.0f);
  for (size_t i = 0; i < encodings.size(); ++i) {
    Values& item = numbers.emplace_back();
    for (size_t k = 0; k < encodings[i].size(); ++k)
      item.push_back(static_cast<float>(100 * i + k + 1));
  }
  const Values where = shard_salm(pack(numbered, numbers, n), layout, me).embeddings;
  const double labels =
      all_reduce_value(world(), sums_of(mine.embeddings, mine.labels).labels, ReduceOp::sum);
  Items grads;
  for (const Values& encoding : encodings) grads.emplace_back(encoding.size(), 0.0f);
  for (size_t t = 0; t < mine.labels.size(); ++t) {
    if (mine.labels[t] == none || where[hidden * t] == 0.0f) continue;
    const auto [dx, dy] = gradient_of(&mine.embeddings[hidden * t], mine.labels[t]);
    const auto number = static_cast<size_t>(where[hidden * t]) - 1;
    grads[number / 100][number % 100] = static_cast<float>(dx / labels);
    grads[number / 100][number % 100 + 1] = static_cast<float>(dy / labels);
  }
  const Items own = encoder_gradient(world(), grads, GatherGradient::sum);
  double of_scale = 0;
  const int64_t each = ceil_div(std::ssize(encodings), n);
  for (size_t i = 0; i < own.size(); ++i) {
    const Values& encoding = encodings[(me * each) + i];  // at scale 1
    for (size_t k = 0; k < encoding.size(); ++k)
      of_scale += static_cast<double>(own[i][k]) * static_cast<double>(encoding[k]);
  }
  of_scale = all_reduce_value(world(), of_scale, ReduceOp::sum);
  EXPECT_GT(std::abs(expected), 0.01);
  EXPECT_NEAR(of_scale, expected, 2e-3 * std::abs(expected));
}

}  // namespace GYRE_FILE
}  // namespace gyre
